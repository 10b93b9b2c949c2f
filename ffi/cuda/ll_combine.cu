#include <algorithm>

#include "cuda/ll_combine.h"
#include "cuda/ll_combine_rows.cuh"

namespace jax_ep::gpu {
namespace {

template <class Transport, RowType kType, int kUnits>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_combine_kernel(const __grid_constant__ LlCombineParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlCombineBlock block;
  LlCounters counters = LlCounters::ask(p.op);
  const LlOpening opening = LlOpening::read(p.op, p.turn, state);
  LlContext ctx{{p.op, state, /*epoch=*/0}, verdict};  // not known yet
  LlCombine<Transport, kType, kUnits> work(ctx, p, shared, block);
  work.prepare();
  counters.look();
  ctx.epoch = counters.epoch(p.turn);
  const bool begun = begin_ll(ctx, p.turn, counters, opening);
  if (begun) {
    work.run();
  } else {
    work.settle();
  }
  finish_ll(ctx, p.turn, begun, /*needs_last=*/false, [&] { spoil_ll_combine(p); }, [] {});
}

using Kernel = void (*)(LlCombineParams);

template <class Transport, RowType kType>
Kernel kernel_of(int units) {
  return units == 1 ? ll_combine_kernel<Transport, kType, 1>
                    : ll_combine_kernel<Transport, kType, kLlMaxUnits>;
}

template <class Transport>
Kernel kernel_of(RowType type, int units) {
  switch (type) {
    case RowType::kFloat32:
      return kernel_of<Transport, RowType::kFloat32>(units);
    case RowType::kBFloat16:
      return kernel_of<Transport, RowType::kBFloat16>(units);
    case RowType::kFloat16:
      return kernel_of<Transport, RowType::kFloat16>(units);
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
  plan.row_bytes = static_cast<int>(shape.row_bytes);
  const int most_rows = shape.num_ranks * shape.num_experts_per_tok;
  SharedLayout layout(limits.max_shared_bytes - kStaticBytes);
  plan.entries_at_once = 32 / shape.num_experts_per_tok * shape.num_experts_per_tok;
  plan.rows_offset = layout.take(int64_t{4} * most_rows);
  plan.weights_offset = layout.take(int64_t{4} * most_rows);
  plan.groups_offset = layout.take(static_cast<int64_t>(sizeof(LlRowGroup)) * shape.num_ranks);
  plan.stage_offset = align_up(layout.used(), 128);
  plan.grid = plan_ll_grid(num_tokens, static_cast<int>(shape.row_bytes / 16), kLlMaxUnits,
                           LlBlocks::kSmall, plan.stage_offset + kStaticBytes, num_sms, limits);
  plan.stage_bytes = static_cast<int>(align_up(plan.grid.part_columns * 16, 128));
  const int64_t room =
      ll_shared_room(plan.grid, num_sms, limits) - kStaticBytes - plan.stage_offset;
  // Remote rows or our own.
  const int most_at_once = std::max(1, shape.num_ranks - 1) * shape.num_experts_per_tok;
  const int64_t most_staged = limits.bulk_copy ? most_at_once : 0;
  plan.num_staged = static_cast<int>(std::clamp<int64_t>(room / plan.stage_bytes, 0, most_staged));
  plan.shared_bytes = plan.stage_offset + int64_t{plan.num_staged} * plan.stage_bytes;
  return plan;
}

cudaError_t prepare_ll_combine() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (int units = 1; units <= kLlMaxUnits; ++units) {
      const Kernel kernel = kernel_of<GroupTransport>(type, units);
      const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_ll_combine(const LlCombineParams& params, cudaStream_t stream) {
  const LlGrid& grid = params.plan.grid;
  const Kernel kernel = kernel_of<GroupTransport>(params.row_type, grid.units);
  kernel<<<grid.num_blocks, grid.threads, static_cast<size_t>(params.plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
