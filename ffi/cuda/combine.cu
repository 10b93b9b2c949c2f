#include <algorithm>

#include "cuda/combine.h"
#include "cuda/combine_bulk.cuh"
#include "cuda/combine_plain.cuh"

namespace jax_ep::gpu {
namespace {

// ---- The kernels.

// All threads of one block: what the outputs of an aborted operation hold.
__device__ void spoil_combine(const CombineParams& p) {
  const WindowShape& shape = p.op.layout.shape;
  fill_nan(p.out, p.op.num_tokens * shape.row_bytes, p.row_type);
  if (p.scalars == nullptr) return;
  fill_nan(reinterpret_cast<char*>(p.scalars),
           int64_t{4} * p.op.num_tokens * shape.num_experts_per_tok, RowType::kFloat32);
}

// Seven warps sum a row of 14 KB, four vectors a lane: fewer instructions for the same bytes than
// fourteen warps with two (measured: 347 against 360 us at 24 blocks).
constexpr int kVectors = 4;
constexpr int kMaxConsumers = 7;
constexpr int kBulkThreads = (kMaxConsumers + kServiceWarps) * kWarp;
constexpr int kPlainThreads = 512;

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kBulkThreads, 1)
    combine_bulk_kernel(const __grid_constant__ CombineParams p) {
#if defined(JAX_EP_BULK_COPY)
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  init_combine_shared(p, shared);
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) combine_bulk<Transport, kType, kVectors>(ctx, p, shared);
  finish_operation(ctx, begun, [&] { spoil_combine(p); });
#endif
}

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kPlainThreads, 1)
    combine_plain_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) combine_plain<Transport, kType>(ctx, p, shared);
  finish_operation(ctx, begun, [&] { spoil_combine(p); });
}

using Kernel = void (*)(CombineParams);

template <class Transport, RowType kType>
Kernel kernel_of(bool bulk) {
  if constexpr (!Transport::kPuts) {
    if (bulk) return combine_bulk_kernel<Transport, kType>;
  }
  return combine_plain_kernel<Transport, kType>;
}
template <class Transport>
Kernel kernel_of(RowType type, bool bulk) {
  switch (type) {
    case RowType::kFloat32:
      return kernel_of<Transport, RowType::kFloat32>(bulk);
    case RowType::kBFloat16:
      return kernel_of<Transport, RowType::kBFloat16>(bulk);
    case RowType::kFloat16:
      return kernel_of<Transport, RowType::kFloat16>(bulk);
  }
  return nullptr;
}

// ---- How a launch uses the device.

// All rows of an item must fit the slots at once, and half of the next item's should.
void plan_bulk(const WindowShape& shape, const DeviceLimits& limits, CombinePlan* plan) {
  constexpr int64_t kPartLimit = kMaxConsumers * kVectors * kWarp * 16;
  constexpr int kMostSlots = 96;
  const int64_t service = 2 * kItemRing * plan->item_bytes + sizeof(CombineShared) +
                          sizeof(CombineBarriers) + sizeof(BlockState) + 1024;
  const int64_t room = limits.max_shared_bytes - service;
  const int wanted = shape.num_experts_per_tok + (shape.num_experts_per_tok + 1) / 2;
  plan->num_parts = static_cast<int>((shape.row_bytes + kPartLimit - 1) / kPartLimit);
  while (true) {
    plan->part_bytes = align_up((shape.row_bytes + plan->num_parts - 1) / plan->num_parts, 128);
    plan->num_slots = static_cast<int>(std::min<int64_t>(kMostSlots, room / plan->part_bytes));
    if (plan->num_slots >= wanted) break;
    ++plan->num_parts;
  }
  const int64_t vectors = plan->part_bytes / 16;
  constexpr int64_t each = kVectors * kWarp;
  plan->consumers =
      static_cast<int>(std::clamp<int64_t>((vectors + each - 1) / each, 1, kMaxConsumers));
  plan->threads = (plan->consumers + kServiceWarps) * kWarp;

  SharedLayout layout(limits.max_shared_bytes);
  layout.take(plan->num_slots * plan->part_bytes);
  plan->items_offset = layout.take(2 * kItemRing * plan->item_bytes);
  plan->schedule_offset = layout.take(sizeof(CombineShared));
  plan->barrier_offset = layout.take(sizeof(CombineBarriers));
  plan->shared_bytes = layout.used();
}

void plan_plain(CombinePlan* plan) {
  const int warps = kPlainThreads / kWarp;
  plan->num_parts = 1;
  plan->threads = kPlainThreads;
  plan->senders = warps / 2;
  plan->items_offset = 0;
  plan->shared_bytes = warps * plan->item_bytes;
}

}  // namespace

CombinePlan plan_combine(const WindowShape& shape, int num_sms, const DeviceLimits& limits) {
  CombinePlan plan{};
  plan.bulk = !GroupTransport::kPuts && limits.bulk_copy;
  plan.num_blocks = num_sms;
  plan.item_bytes = Item::bytes(shape.num_experts_per_tok);
  if (plan.bulk) {
    plan_bulk(shape, limits, &plan);
  } else {
    plan_plain(&plan);
  }
  return plan;
}

cudaError_t prepare_combine() {
  for (RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (bool bulk : {false, true}) {
      const Kernel kernel = kernel_of<GroupTransport>(type, bulk);
      const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream) {
  const CombinePlan& plan = params.plan;
  const Kernel kernel = kernel_of<GroupTransport>(params.row_type, plan.bulk);
  kernel<<<plan.num_blocks, plan.threads, static_cast<size_t>(plan.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
