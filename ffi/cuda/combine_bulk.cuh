// Combine fed by bulk copies. Warps of a block: consumers, which sum; a loader and two planners,
// which feed them (combine_feed.cuh); and a publisher, which sets the flags of rows that have been
// sent.
#pragma once

#include "cuda/combine_feed.cuh"
#include "cuda/vectors.cuh"

#if defined(JAX_EP_BULK_COPY)

namespace jax_ep::gpu {

// One consumer's share of a part: kVectors vectors a lane, a block of consumers apart.
template <RowType kType, int kVectors>
class Share {
 public:
  __device__ Share(int num_consumers, int num_vectors)
      : first_(warp_id() * kWarp + lane_id()),
        stride_(num_consumers * kWarp),
        num_vectors_(num_vectors),
        full_(num_vectors == kVectors * stride_) {}

  // Adds kRows rows, all read before the first is added.
  template <int kRows>
  __device__ void add(const uint4* const (&rows)[kRows], const float* weights) {
    if (full_) {
      add_where<kRows>(rows, weights, [](int) { return true; });
    } else {
      add_where<kRows>(rows, weights, [this](int at) { return at < num_vectors_; });
    }
  }

  __device__ void store(char* destination) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int at = first_ + u * stride_;
      if (full_ || at < num_vectors_) {
        store_streaming(reinterpret_cast<uint4*>(destination) + at, Vector::pack(sum_[u]));
      }
    }
  }

 private:
  using Vector = RowVector<kType>;

  template <int kRows, class Inside>
  __device__ void add_where(const uint4* const (&rows)[kRows], const float* weights,
                            Inside inside) {
    uint4 v[kRows][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int at = first_ + u * stride_;
        v[r][u] = inside(at) ? rows[r][at] : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float weight = weights[r];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) Vector::add_weighted(sum_[u], v[r][u], weight);
    }
  }

  const int first_;
  const int stride_;
  const int num_vectors_;
  const bool full_;
  float sum_[kVectors][Vector::kElements] = {};
};

template <RowType kType, int kVectors>
__device__ void sum_items(const CombineBlock& b) {
  const int num_experts_per_tok = b.p.op.layout.shape.num_experts_per_tok;
  const uint32_t part_bytes = static_cast<uint32_t>(b.p.plan.part_bytes);
  const int num_slots = b.p.plan.num_slots;
  for (uint32_t i = 0;; ++i) {
    const int s = i % kScheduleRing;
    const int o = i % kOutputRing;
    barrier_wait(&b.barriers.loaded[s], i / kScheduleRing % 2);
    const ScheduledPart part = b.state.schedule[s];
    if (i >= kOutputRing) barrier_wait(&b.barriers.flagged[o], (i / kOutputRing - 1) % 2);
    if (part.count == kStop) {
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(&b.barriers.written[o]);
      return;
    }
    Item* item = b.item_at(part.item_offset);
    const float* weights = item->weights(num_experts_per_tok);
    char* destination = item->destination + part.offset;
    Share<kType, kVectors> share(b.p.plan.consumers, part.bytes / 16);
    int slot = part.first_slot;
    const auto next_row = [&] {
      const auto* row = reinterpret_cast<const uint4*>(b.slots + slot * part_bytes);
      slot = slot + 1 == num_slots ? 0 : slot + 1;
      return row;
    };
    int j = 0;
    for (; j + 2 <= part.count; j += 2) {
      const uint4* const first = next_row();
      const uint4* const rows[2] = {first, next_row()};
      share.template add<2>(rows, weights + j);
    }
    if (j < part.count) {
      const uint4* const rows[1] = {next_row()};
      share.template add<1>(rows, weights + j);
    }
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&b.barriers.summed[s]);
    share.store(destination);
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&b.barriers.written[o]);
  }
}

// One lane. One fence covers all rows that have been written since the last.
template <class Transport>
__device__ void publish_rows(const CombineBlock& b) {
  const OpContext& ctx = b.ctx;
  for (uint32_t next = 0;;) {
    uint32_t end = next;
    bool any = false;
    bool stop = false;
    while (end - next < kOutputRing / 2 &&
           barrier_passed(&b.barriers.written[end % kOutputRing], end / kOutputRing % 2)) {
      const int rank = b.state.flags[end % (2 * kOutputRing)].rank;
      any |= rank >= 0;
      stop |= rank == kEndOfFlags;
      ++end;
      if (stop) break;
    }
    if (any) fence_system();
    for (; next != end; ++next) {
      const OutputFlag flag = b.state.flags[next % (2 * kOutputRing)];
      if (flag.rank >= 0) {
        Transport::signal(ctx, flag.rank, combine_flag_offset(ctx, {ctx.rank(), flag.token}),
                          arrival_flag(ctx.chunk_epoch(ctx.chunk_of(flag.token)), true));
      }
      barrier_arrive(&b.barriers.flagged[next % kOutputRing]);
    }
    if (stop) return;
  }
}

__device__ inline CombineBlock combine_block(const OpContext& ctx, const CombineParams& p,
                                             char* shared) {
  return {ctx,
          p,
          shared,
          shared + p.plan.items_offset,
          *reinterpret_cast<CombineShared*>(shared + p.plan.schedule_offset),
          *reinterpret_cast<CombineBarriers*>(shared + p.plan.barrier_offset)};
}

__device__ inline void init_combine_shared(const CombineParams& p, char* shared) {
  const int tid = static_cast<int>(threadIdx.x);
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  auto& state = *reinterpret_cast<CombineShared*>(shared + p.plan.schedule_offset);
  auto& barriers = *reinterpret_cast<CombineBarriers*>(shared + p.plan.barrier_offset);
  // By one lane of each warp: those of several lanes are set up one by one (64 took 2 us).
  if (lane_id() == 0) {
    for (int i = warp_id(); i < kScheduleRing; i += num_warps) {
      barrier_init(&barriers.loaded[i], 1);
      barrier_init(&barriers.summed[i], p.plan.consumers);
    }
    for (int i = warp_id(); i < kOutputRing; i += num_warps) {
      barrier_init(&barriers.written[i], p.plan.consumers);
      barrier_init(&barriers.flagged[i], 1);
    }
    barrier_init_fence();
  }
  if (tid < kPlanners) state.planner[tid] = {0, 0, 0};
}

template <class Transport, RowType kType, int kVectors>
__device__ void combine_bulk(const OpContext& ctx, const CombineParams& p, char* shared) {
  const CombineBlock b = combine_block(ctx, p, shared);
  switch (warp_id() - p.plan.consumers) {
    case 0:
      return Loader(b).run();
    case 1:
      return plan_sends<Transport>(b);
    case 2:
      return plan_finals(b);
    case 3:
      if (lane_id() == 0) publish_rows<Transport>(b);
      return;
    default:
      return sum_items<kType, kVectors>(b);
  }
}

}  // namespace jax_ep::gpu

#endif  // JAX_EP_BULK_COPY
