#include "cuda/ll_combine.h"
#include "cuda/ll_combine_rows.cuh"

namespace jax_ep::gpu {
namespace {

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_combine_kernel(const __grid_constant__ LlCombineParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlCombineItem item;
  const LlCounters counters = LlCounters::read(p.op);
  const LlOpening opening = LlOpening::read(p.op, p.turn);
  const LlContext ctx{{p.op, state, counters.epoch(p.turn)}, verdict};
  ctx.clear();
  LlCombine<Transport, kType> work(ctx, p, shared, item);
  work.prepare();
  const bool begun = begin_ll(ctx, p.turn, counters, opening);
  if (begun) work.run();
  const bool alone = p.turn.receive && !p.turn.send;
  finish_ll(
      ctx, p.turn, counters, begun, alone, [&] { spoil_ll_combine(p); },
      [&] { send_credits(ctx); });
}

using Kernel = void (*)(LlCombineParams);

template <class Transport>
Kernel kernel_of(RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return ll_combine_kernel<Transport, RowType::kFloat32>;
    case RowType::kBFloat16:
      return ll_combine_kernel<Transport, RowType::kBFloat16>;
    case RowType::kFloat16:
      return ll_combine_kernel<Transport, RowType::kFloat16>;
  }
  return nullptr;
}

}  // namespace

LlCombinePlan plan_ll_combine(const WindowShape& shape, int num_tokens, int num_sms,
                              const DeviceLimits& limits) {
  constexpr int64_t kStaticBytes = 2048;
  LlCombinePlan plan{};
  plan.by_experts_per_tok = LlDivisor::of(shape.num_experts_per_tok);
  plan.by_experts_per_rank = LlDivisor::of(shape.experts_per_rank());
  SharedLayout layout(limits.max_shared_bytes - kStaticBytes);
  plan.list_offset = layout.take(static_cast<int64_t>(sizeof(LlCombineRow)) * shape.num_ranks *
                                 shape.num_experts_per_tok);
  plan.shared_bytes = layout.used();
  plan.grid = plan_ll_grid(num_tokens, static_cast<int>(shape.row_bytes / 16),
                           plan.shared_bytes + kStaticBytes, num_sms, limits);
  return plan;
}

cudaError_t prepare_ll_combine() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    const cudaError_t error =
        prepare_kernel(reinterpret_cast<const void*>(kernel_of<GroupTransport>(type)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_ll_combine(const LlCombineParams& params, cudaStream_t stream) {
  const LlGrid& grid = params.plan.grid;
  const Kernel kernel = kernel_of<GroupTransport>(params.row_type);
  kernel<<<grid.num_blocks, grid.threads, static_cast<size_t>(params.plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
