// Combine's gradient with ordinary 16-byte accesses: where there are no bulk copies, and for rows
// too large for them.
#pragma once

#include "cuda/combine_grad_rows.cuh"
#include "cuda/row_exchange.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// One pass of a warp over a cotangent g makes the gradients of kRows expert rows. The pass is bound
// by latency: kDepth vectors of g and of each row are on their way while those before them are
// used.
template <RowType kType, int kRows>
class GradPass {
 public:
  // Lane i of the first kRows of `lanes` holds a row and its weight.
  __device__ GradPass(const CombineGradParams& p, const char* g, int row, float weight,
                      unsigned lanes)
      : g_(reinterpret_cast<const uint4*>(g) + lane_id()),
        num_vectors_(static_cast<int>(p.op.layout.shape.row_bytes / 16)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int lane = __ffs(lanes) - 1;
      const int64_t first = int64_t{__shfl_sync(kFullWarp, row, lane)} * num_vectors_ + lane_id();
      y_[r] = reinterpret_cast<const uint4*>(p.y) + first;
      d_y_[r] = reinterpret_cast<uint4*>(p.d_y) + first;
      weights_[r] = __shfl_sync(kFullWarp, weight, lane);
      lanes &= lanes - 1;
    }
  }

  // The dot products <y, g>, in lane 0.
  __device__ void run(float (&sums)[kRows]) {
    const int steps = num_vectors_ / (kDepth * kWarp) * kDepth;  // whole rounds of whole warps
    if (steps > 0) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) load(d, d);
    }
    for (int step = 0; step < steps; step += kDepth) {
      const bool more = step + kDepth < steps;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        use(d, step + d);
        if (more) load(d, step + d + kDepth);
      }
    }
    for (int step = steps; step * kWarp < num_vectors_; step += kDotVectors) {
#pragma unroll
      for (int d = 0; d < kDotVectors; ++d) {
        if ((step + d) * kWarp + lane_id() >= num_vectors_) continue;
        load(d, step + d);
        use(d, step + d);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = dots_[r].fold();
  }

 private:
  using Vector = RowVector<kType>;
  static constexpr int kDotVectors = WarpDot<kType>::kVectors;
  static constexpr int kDepth = 4;
  static_assert(kDepth % kDotVectors == 0);

  __device__ void load(int d, int step) {
    loaded_g_[d] = load_streaming(g_ + step * kWarp);
#pragma unroll
    for (int r = 0; r < kRows; ++r) loaded_y_[d][r] = load_constant(y_[r] + step * kWarp);
  }

  __device__ void use(int d, int step) {
    float cotangent[Vector::kElements];
    Vector::unpack(loaded_g_[d], cotangent);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float value[Vector::kElements];
      Vector::unpack(loaded_y_[d][r], value);
      dots_[r].add(d % kDotVectors, value, cotangent);
#pragma unroll
      for (int i = 0; i < Vector::kElements; ++i) value[i] = weights_[r] * cotangent[i];
      store_streaming(d_y_[r] + step * kWarp, Vector::pack(value));
    }
  }

  const uint4* const g_;
  const int num_vectors_;
  const uint4* y_[kRows];
  uint4* d_y_[kRows];
  float weights_[kRows];
  WarpDot<kType> dots_[kRows];
  uint4 loaded_g_[kDepth];
  uint4 loaded_y_[kDepth][kRows];
};

// A call: inlined, the pass would share its registers with the state of the loops around it.
template <RowType kType, int kRows>
__device__ __noinline__ void make_gradients(const CombineGradParams& p, const char* g, int row,
                                            float weight, unsigned lanes) {
  float sums[kRows];
  GradPass<kType, kRows>(p, g, row, weight, lanes).run(sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int of = __shfl_sync(kFullWarp, row, __ffs(lanes) - 1);
    if (lane_id() == 0) p.d_row_weights[of] = sums[r];
    lanes &= lanes - 1;
  }
}

template <RowType kType>
class GradWork {
 public:
  using Entry = GradEntry;
  explicit __device__ GradWork(const OpContext& ctx, const CombineGradParams& p)
      : ctx_(ctx), p_(p) {}

  __device__ Entry load(int token) const { return load_grad_entry(p_, token); }
  __device__ const char* source_row(int token) const {
    return p_.g + token * p_.op.layout.shape.row_bytes;
  }
  __device__ int64_t message_bytes() const { return p_.op.layout.shape.row_bytes; }
  __device__ void write_record(char*, int, const Entry&, int) const {}
  __device__ void absent(MessageId) const {}
  __device__ void keep(int token, const Entry&) const {
    receive(source_row(token), {ctx_.rank(), token});
  }
  __device__ void receive(const char* g, MessageId id) const {
    const GradRow row = load_grad_row(p_, id);
    unsigned lanes = __ballot_sync(kFullWarp, row.row >= 0);
    for (int left = __popc(lanes); left > 0;) {
      const int rows = min(left, 2);
      if (rows == 1) make_gradients<kType, 1>(p_, g, row.row, row.weight, lanes);
      if (rows == 2) make_gradients<kType, 2>(p_, g, row.row, row.weight, lanes);
      for (int i = 0; i < rows; ++i) lanes &= lanes - 1;
      left -= rows;
    }
  }

 private:
  const OpContext& ctx_;
  const CombineGradParams& p_;
};

}  // namespace jax_ep::gpu
