// Combine's gradient by bulk copies. A warp holds a cotangent g in shared memory and takes the
// expert rows y of its token one after the other, in pieces: while one piece is turned into its
// gradient in place, the next two are loaded or the one before is stored. What a warp has sent is
// published by a warp of its own: completion and the fence take as long as a row's gradient.
#pragma once

#include "cuda/combine_grad_rows.cuh"
#include "cuda/outbox.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

constexpr int kPieces = 3;                  // of rows, that a warp holds beside g
constexpr int kGradBarriers = 1 + kPieces;  // of one warp
// Bulk copies complete by thread: the lane that moves rows is, but for K = 32, none that pushes.
constexpr int kRowLane = kWarp - 1;

#if defined(JAX_EP_BULK_COPY)

// The shared memory of one warp.
struct GradStages {
  char* base;
  uint64_t* barriers;
  int64_t g_bytes;
  int64_t piece_bytes;

  __device__ char* g() const { return base; }
  __device__ char* piece(uint32_t index) const {
    return base + g_bytes + index % kPieces * piece_bytes;
  }
  __device__ uint64_t* g_barrier() const { return barriers; }
  __device__ uint64_t* piece_barrier(uint32_t index) const {
    return barriers + 1 + index % kPieces;
  }
};

// Goes through the pieces of the rows that `lanes` hold.
struct PieceCursor {
  unsigned lanes;
  int part;

  __device__ bool valid() const { return lanes != 0; }
  __device__ int lane() const { return __ffs(lanes) - 1; }
  __device__ void advance(int num_parts) {
    if (++part < num_parts) return;
    part = 0;
    lanes &= lanes - 1;
  }
};

template <class Transport, RowType kType>
class BulkGrad {
 public:
  __device__ BulkGrad(const OpContext& ctx, const CombineGradParams& p, const GradStages& stages)
      : ctx_(ctx),
        p_(p),
        stages_(stages),
        row_bytes_(static_cast<uint32_t>(p.op.layout.shape.row_bytes)) {}

  __device__ void send(Outbox& box) {
    Tickets tickets(ctx_.op.state()->send_ticket);
    int chunk = 0;
    uint32_t sent = 0;
    for (int token; (token = static_cast<int>(tickets.take())) < p_.op.num_tokens;) {
      if (ctx_.chunk_of(token) != chunk) {
        chunk = ctx_.chunk_of(token);
        if (!wait_for_credits(ctx_, chunk)) break;
      }
      load_g(p_.g + int64_t{token} * row_bytes_);
      const GradEntry entry = load_grad_entry(p_, token);
      const GradRow row = load_grad_row(p_, {ctx_.rank(), token});
      const Destinations to = destinations_of(ctx_, entry.rank);
      PieceCursor loads = start_rows(row);
      wait_g();
      if (to.leaders != 0) {
        if (lane_id() == 0) post(box, sent, token, to.ranks);
        push(token, entry, to);
      }
      set_absent_flags<Transport>(ctx_, token, to.ranks);
      make_gradients(row, loads);
      if (to.leaders == 0) continue;
      if (to.leaders >> lane_id() & 1) bulk_wait<0>();  // also: g may be overwritten
      __syncwarp();
      ++sent;
      if (lane_id() == 0) store_release<kBlockScope>(&box.completed, sent);
    }
    if (lane_id() == 0) store_release<kBlockScope>(&box.finished, 1u);
  }

  __device__ void receive() {
    Arrivals arrivals(ctx_);
    while (!arrivals.exhausted()) {
      MessageId id;
      const bool found = arrivals.poll(&id, [&](MessageId absent) { count_read(absent); });
      if (!found) {
        if (arrivals.give_up(ctx_)) return;
        continue;
      }
      fence_bulk_global();  // the flag was acquired with ordinary loads
      load_g(ctx_.own_window(message_offset(ctx_, id)));
      const GradRow row = load_grad_row(p_, id);
      PieceCursor loads = start_rows(row);
      wait_g();
      count_read(id);
      make_gradients(row, loads);
    }
  }

  // Nothing may be on its way out of shared memory when the block ends.
  __device__ void finish() { bulk_wait<0>(); }

 private:
  using Vector = RowVector<kType>;
  using Dot = WarpDot<kType>;

  __device__ void load_g(const char* from) {
    __syncwarp();
    if (lane_id() == 0) {
      barrier_expect(stages_.g_barrier(), row_bytes_);
      bulk_load(stages_.g(), from, row_bytes_, stages_.g_barrier());
    }
  }
  __device__ void wait_g() { barrier_wait(stages_.g_barrier(), g_used_++ % 2); }

  __device__ uint32_t bytes_of(int part) const {
    const uint32_t piece_bytes = static_cast<uint32_t>(stages_.piece_bytes);
    return min(piece_bytes, row_bytes_ - part * piece_bytes);
  }
  __device__ int64_t offset_of(int row, int part) const {
    return int64_t{row} * row_bytes_ + part * stages_.piece_bytes;
  }

  __device__ void load_piece(const GradRow& row, PieceCursor& next) {
    if (!next.valid()) return;
    const int from = __shfl_sync(kFullWarp, row.row, next.lane());
    __syncwarp();
    if (lane_id() == kRowLane) {
      bulk_wait_read<1>();  // the last but one of the stores, which was in this stage
      uint64_t* barrier = stages_.piece_barrier(loaded_);
      barrier_expect(barrier, bytes_of(next.part));
      bulk_load(stages_.piece(loaded_), p_.y + offset_of(from, next.part), bytes_of(next.part),
                barrier);
    }
    ++loaded_;
    next.advance(p_.plan.num_parts);
  }

  // Starts the first loads of a message's rows; the cursor of the next.
  __device__ PieceCursor start_rows(const GradRow& row) {
    PieceCursor next{__ballot_sync(kFullWarp, row.row >= 0), 0};
    for (int i = 0; i < kPieces - 1; ++i) load_piece(row, next);
    return next;
  }

  __device__ void push(int token, const GradEntry& entry, const Destinations& to) {
    if ((to.leaders >> lane_id() & 1) == 0) return;
    const int64_t message = message_offset(ctx_, {ctx_.rank(), token});
    bulk_store(Transport::window(ctx_, entry.rank, message), stages_.g(), row_bytes_);
    bulk_commit();
  }

  __device__ void make_gradients(const GradRow& row, PieceCursor& loads) {
    Dot dot;
    for (PieceCursor piece{__ballot_sync(kFullWarp, row.row >= 0), 0}; piece.valid();) {
      const int to = __shfl_sync(kFullWarp, row.row, piece.lane());
      const float weight = __shfl_sync(kFullWarp, row.weight, piece.lane());
      const int part = piece.part;
      if (part == 0) dot = Dot{};
      barrier_wait(stages_.piece_barrier(used_), used_ / kPieces % 2);
      make_piece(stages_.g() + part * stages_.piece_bytes, stages_.piece(used_), bytes_of(part),
                 weight, &dot);
      fence_bulk_shared();
      __syncwarp();
      if (lane_id() == kRowLane) {
        bulk_store_evict_first(p_.d_y + offset_of(to, part), stages_.piece(used_), bytes_of(part));
        bulk_commit();
      }
      ++used_;
      load_piece(row, loads);
      piece.advance(p_.plan.num_parts);
      if (piece.part != 0) continue;
      const float sum = dot.fold();
      if (lane_id() == 0) p_.d_row_weights[to] = sum;
    }
  }

  // Turns a piece of y into weight * g, and adds to <y, g>. Several steps are read before the first
  // is written: the compiler cannot know that the rows do not overlap.
  __device__ static void make_piece(const char* g, char* y, uint32_t bytes, float weight,
                                    Dot* dot) {
    constexpr int kSteps = 2;
    static_assert(kSteps % Dot::kVectors == 0);
    const auto* from = reinterpret_cast<const uint4*>(g) + lane_id();
    auto* row = reinterpret_cast<uint4*>(y) + lane_id();
    const int num_vectors = static_cast<int>(bytes / 16);
    const int whole = num_vectors / (kSteps * kWarp) * (kSteps * kWarp);
#pragma unroll 2
    for (int at = 0; at < whole; at += kSteps * kWarp) {
      uint4 cotangents[kSteps];
      uint4 values[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        cotangents[s] = from[at + s * kWarp];
        values[s] = row[at + s * kWarp];
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        row[at + s * kWarp] = make_vector(cotangents[s], values[s], weight, s % Dot::kVectors, dot);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = whole + s * kWarp;
      if (at + lane_id() >= num_vectors) continue;
      row[at] = make_vector(from[at], row[at], weight, s % Dot::kVectors, dot);
    }
  }

  __device__ static uint4 make_vector(uint4 cotangents, uint4 values, float weight, int dot_vector,
                                      Dot* dot) {
    float cotangent[Vector::kElements];
    float value[Vector::kElements];
    Vector::unpack(cotangents, cotangent);
    Vector::unpack(values, value);
    dot->add(dot_vector, value, cotangent);
#pragma unroll
    for (int i = 0; i < Vector::kElements; ++i) value[i] = weight * cotangent[i];
    return Vector::pack(value);
  }

  __device__ void count_read(MessageId id) {
    if (lane_id() == 0) count_slots_read(ctx_, ctx_.chunk_of(id.token), 1);
  }

  const OpContext& ctx_;
  const CombineGradParams& p_;
  const GradStages stages_;
  const uint32_t row_bytes_;
  uint32_t g_used_ = 0;
  uint32_t loaded_ = 0;  // pieces
  uint32_t used_ = 0;
};

__device__ inline GradStages grad_stages(const CombineGradParams& p, char* shared, int warp) {
  auto* barriers = reinterpret_cast<uint64_t*>(shared + p.plan.barrier_offset);
  return {shared + warp * p.plan.warp_bytes(), barriers + warp * kGradBarriers, p.plan.g_bytes,
          p.plan.piece_bytes};
}

__device__ inline void init_grad_shared(const CombineGradParams& p, char* shared) {
  auto* barriers = reinterpret_cast<uint64_t*>(shared + p.plan.barrier_offset);
  auto* boxes = reinterpret_cast<Outbox*>(shared + p.plan.outbox_offset);
  const int tid = static_cast<int>(threadIdx.x);
  // By one lane of each warp: those of several lanes are set up one by one.
  if (lane_id() == 0 && warp_id() < p.plan.workers) {
    for (int i = 0; i < kGradBarriers; ++i)
      barrier_init(barriers + warp_id() * kGradBarriers + i, 1);
    barrier_init_fence();
  }
  if (tid < p.plan.senders) boxes[tid].completed = boxes[tid].published = boxes[tid].finished = 0;
}

template <class Transport, RowType kType>
__device__ void combine_grad_bulk(const OpContext& ctx, const CombineGradParams& p, char* shared) {
  auto* boxes = reinterpret_cast<Outbox*>(shared + p.plan.outbox_offset);
  if (warp_id() == p.plan.workers) return publish<Transport>(ctx, boxes, p.plan.senders);
  BulkGrad<Transport, kType> work(ctx, p, grad_stages(p, shared, warp_id()));
  if (warp_id() < p.plan.senders) work.send(boxes[warp_id()]);
  if (!__any_sync(kFullWarp, ctx.aborted())) work.receive();
  work.finish();
}

#endif  // JAX_EP_BULK_COPY

}  // namespace jax_ep::gpu
