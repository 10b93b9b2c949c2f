// Where dispatch's bulk copies pass through shared memory: two stages a warp, each with a barrier,
// and the parts in which a row passes through them.
#pragma once

#include "cuda/dispatch_float8.cuh"
#include "cuda/dispatch_rows.cuh"

namespace jax_ep::gpu {

constexpr int kStages = 2;  // of one warp

#if defined(JAX_EP_BULK_COPY)

// Items are numbered; item i uses stage i % kStages.
struct Stages {
  char* base;
  uint64_t* barriers;
  int64_t stage_bytes;

  __device__ char* at(int item) const { return base + (item % kStages) * stage_bytes; }
  __device__ uint64_t* barrier(int item) const { return barriers + item % kStages; }
  __device__ void wait(int item) const { barrier_wait(barrier(item), item / kStages % 2); }
};

__device__ inline Stages stages_of(const DispatchParams& p, char* shared, int warp) {
  auto* barriers = reinterpret_cast<uint64_t*>(shared + p.plan.barrier_offset);
  return {shared + int64_t{warp} * kStages * p.plan.stage_bytes, barriers + warp * kStages,
          p.plan.stage_bytes};
}

// Part `index` of a row.
struct Part {
  int64_t offset;
  uint32_t bytes;
  bool last;
};
__device__ inline Part part_of(const DispatchParams& p, int index) {
  const int64_t offset = index * p.plan.part_bytes;
  const int64_t left = p.op.layout.shape.row_bytes - offset;
  const bool last = index + 1 == p.plan.num_parts;
  return {offset, static_cast<uint32_t>(last ? left : p.plan.part_bytes), last};
}

// A part to the output rows of its entries. Packed rows have one part.
template <bool kPacked>
__device__ void store_part(const DispatchParams& p, MessageId id, int row, const Part& part,
                           const char* stage) {
  if constexpr (kPacked) {
    store_packed_row<Packed::kShared>(p, id, row, stage);
  } else if (char* target = copy_target(p, id, row)) {
    bulk_store_evict_first(target + part.offset, stage, part.bytes);
  }
}

#endif  // JAX_EP_BULK_COPY

}  // namespace jax_ep::gpu
