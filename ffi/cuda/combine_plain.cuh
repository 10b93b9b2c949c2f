// Combine with ordinary 16-byte loads: one warp per item. Where there are no bulk copies.
#pragma once

#include "cuda/combine_items.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// Sums an item of at most kRows rows, kSteps vectors a lane at a time: kRows * kSteps loads in
// flight hide their latency and still fit the registers.
template <RowType kType, int kRows, int kSteps>
__device__ void sum_few_rows(Item* item, const float* weights, int num_vectors) {
  using Vector = RowVector<kType>;
  auto* to = reinterpret_cast<uint4*>(item->destination);
  const int count = item->count;
  for (int first = lane_id(); first < num_vectors; first += kSteps * kWarp) {
    uint4 v[kRows][kSteps];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto* from = reinterpret_cast<const uint4*>(item->sources()[r < count ? r : 0]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int at = first + s * kWarp;
        v[r][s] = make_uint4(0, 0, 0, 0);
        if (r < count && at < num_vectors) v[r][s] = load_streaming(from + at);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float sum[Vector::kElements] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < count) Vector::add_weighted(sum, v[r][s], weights[r]);
      }
      const int at = first + s * kWarp;
      if (at < num_vectors) store_streaming(to + at, Vector::pack(sum));
    }
  }
}

// Sums an item of any number of rows, one vector a lane at a time.
template <RowType kType>
__device__ void sum_many_rows(Item* item, const float* weights, int num_vectors) {
  using Vector = RowVector<kType>;
  for (int at = lane_id(); at < num_vectors; at += kWarp) {
    float sum[Vector::kElements] = {};
#pragma unroll 4
    for (int r = 0; r < item->count; ++r) {
      const auto* from = reinterpret_cast<const uint4*>(item->sources()[r]);
      Vector::add_weighted(sum, load_streaming(from + at), weights[r]);
    }
    store_streaming(reinterpret_cast<uint4*>(item->destination) + at, Vector::pack(sum));
  }
}

template <RowType kType>
__device__ void sum_item(const CombineParams& p, Item* item) {
  const WindowShape& shape = p.op.layout.shape;
  const float* weights = item->weights(shape.num_experts_per_tok);
  const int num_vectors = static_cast<int>(shape.row_bytes / 16);
  if (item->count <= 2) {
    sum_few_rows<kType, 2, 7>(item, weights, num_vectors);
  } else if (item->count <= 4) {
    sum_few_rows<kType, 4, 4>(item, weights, num_vectors);
  } else if (item->count <= 8) {
    sum_few_rows<kType, 8, 2>(item, weights, num_vectors);
  } else {
    sum_many_rows<kType>(item, weights, num_vectors);
  }
}

template <class Transport, RowType kType>
__device__ void send_sums(const OpContext& ctx, const CombineParams& p, Item* item) {
  SendItems sends(ctx, p, 1);
  while (sends.next()) {
    sends.send_side_data<Transport>();
    const unsigned items = sends.items();
    if (items == 0) continue;
    sends.write<Transport>(items, [&](int) { return item; });
    __syncwarp();
    sum_item<kType>(p, item);
    __syncwarp();
    if constexpr (Transport::kPuts) {
      Transport::put(ctx, item->flag_rank, combine_row_offset(ctx, {ctx.rank(), item->token}),
                     p.op.layout.shape.row_bytes);
      Transport::order(ctx.op);
    }
    if (lane_id() == 0) {
      fence_system();
      const int token = item->token;
      Transport::signal(ctx, item->flag_rank, combine_flag_offset(ctx, {ctx.rank(), token}),
                        arrival_flag(ctx.chunk_epoch(ctx.chunk_of(token)), true));
    }
    __syncwarp();
  }
}

template <RowType kType>
__device__ void finish_tokens(const OpContext& ctx, const CombineParams& p, Item* item) {
  FinalItems finals(ctx, p, 1);
  while (finals.next()) {
    while (finals.poll() == 0) {
      if (finals.give_up()) return;
    }
    finals.write(0, 1, [&](int) { return item; });
    __syncwarp();
    sum_item<kType>(p, item);
    __syncwarp();
    if (lane_id() == 0) {
      count_slots_read(ctx, ctx.chunk_of(item->token), ctx.num_ranks() - 1);
    }
    __syncwarp();
  }
}

// Some warps send first; the others never wait for a credit, so that every rank can finish the
// tokens that its peers' credits depend on.
template <class Transport, RowType kType>
__device__ void combine_plain(const OpContext& ctx, const CombineParams& p, char* shared) {
  auto* item = reinterpret_cast<Item*>(shared + warp_id() * p.plan.item_bytes);
  if (speaks_for_rank() && warp_id() == static_cast<int>(blockDim.x) / kWarp - 1) {
    for (int r = lane_id(); r < ctx.num_ranks(); r += kWarp) check_tag(ctx, r);
    __syncwarp();
  }
  if (warp_id() < p.plan.senders) send_sums<Transport, kType>(ctx, p, item);
  __syncwarp();
  if (!__any_sync(kFullWarp, ctx.aborted())) finish_tokens<kType>(ctx, p, item);
}

}  // namespace jax_ep::gpu
