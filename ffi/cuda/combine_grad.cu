#include <algorithm>

#include "cuda/combine_grad.h"
#include "cuda/combine_grad_bulk.cuh"
#include "cuda/combine_grad_marks.cuh"
#include "cuda/combine_grad_plain.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 384;  // more would leave a thread too few registers

// All threads: the work between the beginning and the end of the operation.
template <class Exchange>
__device__ void make_all_gradients(const OpContext& ctx, const CombineGradParams& p,
                                   Exchange exchange) {
  mark_named_rows(p);
  if (speaks_for_rank() && warp_id() == p.plan.workers - 1) {
    for (int r = lane_id(); r < ctx.num_ranks(); r += kWarp) check_tag(ctx, r);
    __syncwarp();
  }
  exchange();
  if (threadIdx.x == 0) wait_for_marks(ctx);
  if (!__syncthreads_or(ctx.aborted())) zero_unnamed_rows(p);
}

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kThreads, 1)
    combine_grad_bulk_kernel(const __grid_constant__ CombineGradParams p) {
#if defined(JAX_EP_BULK_COPY)
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  init_grad_shared(p, shared);
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    make_all_gradients(ctx, p, [&] { combine_grad_bulk<Transport, kType>(ctx, p, shared); });
  }
  finish_operation(ctx, begun, [&] { spoil_combine_grad(p); });
#endif
}

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kThreads, 1)
    combine_grad_plain_kernel(const __grid_constant__ CombineGradParams p) {
  __shared__ BlockState block;
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    GradWork<kType> work(ctx, p);
    make_all_gradients(ctx, p, [&] { exchange_rows<Transport>(ctx, work, p.plan.senders); });
  }
  finish_operation(ctx, begun, [&] { spoil_combine_grad(p); });
}

using Kernel = void (*)(CombineGradParams);

template <class Transport, RowType kType>
Kernel kernel_of(bool bulk) {
  if constexpr (!Transport::kPuts) {
    if (bulk) return combine_grad_bulk_kernel<Transport, kType>;
  }
  return combine_grad_plain_kernel<Transport, kType>;
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

}  // namespace

CombineGradPlan plan_combine_grad(const WindowShape& shape, int num_sms,
                                  const DeviceLimits& limits) {
  constexpr int kFewestBulkWarps = 3;  // with fewer, plain accesses keep more rows in flight
  constexpr int64_t kMostPieceBytes = 8192;
  constexpr int64_t kSmallThings = 4096;  // barriers, static shared memory
  CombineGradPlan plan{};
  plan.num_blocks = num_sms;
  plan.num_parts = static_cast<int>((shape.row_bytes + kMostPieceBytes - 1) / kMostPieceBytes);
  plan.piece_bytes = align_up((shape.row_bytes + plan.num_parts - 1) / plan.num_parts,
                              kDotLanes * 4);  // no piece ends inside a round of the dot product
  plan.num_parts = static_cast<int>((shape.row_bytes + plan.piece_bytes - 1) / plan.piece_bytes);
  plan.g_bytes = align_up(shape.row_bytes, 128);
  const int64_t room = limits.max_shared_bytes - kSmallThings;
  constexpr int kMostWarps = kThreads / kWarp;
  plan.workers = static_cast<int>(std::min<int64_t>(kMostWarps - 1, room / plan.warp_bytes()));
  plan.bulk = !GroupTransport::kPuts && limits.bulk_copy && plan.workers >= kFewestBulkWarps;
  if (!plan.bulk) plan.workers = kMostWarps;
  plan.senders = shape.num_ranks == 1 ? plan.workers : plan.workers / 2;
  plan.threads = (plan.workers + (plan.bulk ? 1 : 0)) * kWarp;
  if (plan.bulk) {
    SharedLayout layout(limits.max_shared_bytes - kSmallThings / 2);
    layout.take(plan.workers * plan.warp_bytes());
    plan.barrier_offset = layout.take(int64_t{8} * kGradBarriers * plan.workers);
    plan.outbox_offset = layout.take(plan.senders * static_cast<int64_t>(sizeof(Outbox)));
    plan.shared_bytes = layout.used();
  }
  return plan;
}

cudaError_t prepare_combine_grad() {
  for (RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (bool bulk : {false, true}) {
      const Kernel kernel = kernel_of<GroupTransport>(type, bulk);
      const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_combine_grad(const CombineGradParams& params, cudaStream_t stream) {
  const CombineGradPlan& plan = params.plan;
  const Kernel kernel = kernel_of<GroupTransport>(params.row_type, plan.bulk);
  kernel<<<plan.num_blocks, plan.threads, static_cast<size_t>(plan.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
