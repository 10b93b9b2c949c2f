#include <algorithm>

#include "cuda/ll_dispatch.h"
#include "cuda/ll_dispatch_rows.cuh"

namespace jax_ep::gpu {
namespace {

// ---- The kernels.

template <class Transport, class Wire, class Places>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_dispatch_kernel(const __grid_constant__ LlDispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlDispatchBlock block;
  LlCounters counters = LlCounters::ask(p.op);
  const LlOpening opening = LlOpening::read(p.op, p.turn);
  LlContext ctx{{p.op, state, /*epoch=*/0}, verdict};  // not known yet
  LlDispatch<Transport, Wire, Places> work(ctx, p, shared, block);
  work.prepare();
  counters.look();
  ctx.epoch = counters.epoch(p.turn);
  const bool begun = begin_ll(ctx, p.turn, counters, opening);
  if (begun) work.run();
  const bool alone = p.turn.receive && !p.turn.send;
  const bool in_device_memory = p.plan.masks_offset < 0 || p.plan.bases_offset < 0;
  finish_ll(
      ctx, p.turn, counters, begun, alone || in_device_memory, [&] { spoil_ll_dispatch(p); },
      [&] {
        if (alone) send_credits(ctx);
        if (in_device_memory) clear_channel_state(p.op);
      });
}

using Kernel = void (*)(LlDispatchParams);

template <class Wire>
Kernel kernel_of(bool padded) {
  if (padded) return ll_dispatch_kernel<GroupTransport, Wire, PaddedPlaces>;
  return ll_dispatch_kernel<GroupTransport, Wire, CompactPlaces>;
}

Kernel kernel_of(LlOutput output, RowType type, bool padded, int units) {
  if (output == LlOutput::kRows) {
    return units == 1 ? kernel_of<PlainWire<1>>(padded) : kernel_of<PlainWire<kLlMaxUnits>>(padded);
  }
  switch (type) {
    case RowType::kFloat32:
      return kernel_of<QuantizedWire<RowType::kFloat32>>(padded);
    case RowType::kBFloat16:
      return kernel_of<QuantizedWire<RowType::kBFloat16>>(padded);
    case RowType::kFloat16:
      return kernel_of<QuantizedWire<RowType::kFloat16>>(padded);
  }
  return nullptr;
}

}  // namespace

LlDispatchPlan plan_ll_dispatch(const WindowShape& shape, int num_tokens, LlOutput output,
                                RowType row_type, int num_sms, const DeviceLimits& limits) {
  constexpr int64_t kStaticBytes = 2048;
  constexpr int64_t kManyBytes = 1 << 20;  // some microseconds of the link
  LlDispatchPlan plan{};
  plan.by_experts_per_tok = LlDivisor::of(shape.num_experts_per_tok);
  plan.by_experts_per_rank = LlDivisor::of(shape.experts_per_rank());
  plan.experts_per_rank = shape.experts_per_rank();
  plan.mask_groups = std::max(1, (num_tokens + 127) / 128);
  SharedLayout layout(limits.max_shared_bytes - kStaticBytes);
  plan.rows_offset = layout.take(int64_t{4} * (shape.num_ranks * shape.num_experts_per_tok + 1));
  plan.masks_offset = layout.take_if_room(int64_t{16} * shape.num_experts * plan.mask_groups);
  plan.bases_offset =
      layout.take_if_room(4 * Placement::words(shape.num_experts, shape.experts_per_rank()));
  plan.shared_bytes = layout.used();
  const int64_t columns =
      output == LlOutput::kRows
          ? shape.row_bytes / 16
          : align_up(shape.row_bytes / row_type_bytes(row_type), kQuantizedUnit) / kQuantizedUnit;
  const int most_units = output == LlOutput::kRows ? kLlMaxUnits : 1;
  plan.grid = plan_ll_grid(num_tokens, static_cast<int>(columns), most_units,
                           plan.shared_bytes + kStaticBytes, num_sms, limits);
  const int64_t wire_bytes =
      num_tokens * columns * 16 * std::min(shape.num_ranks - 1, shape.num_experts_per_tok);
  plan.own_rows_first =
      wire_bytes >= kManyBytes && plan.grid.num_items(num_tokens) <= plan.grid.num_blocks;
  return plan;
}

cudaError_t prepare_ll_dispatch() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (const LlOutput output : {LlOutput::kRows, LlOutput::kValues}) {
      for (const bool padded : {false, true}) {
        for (int units = 1; units <= kLlMaxUnits; ++units) {
          const Kernel kernel = kernel_of(output, type, padded, units);
          const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_ll_dispatch(const LlDispatchParams& params, cudaStream_t stream) {
  const LlGrid& grid = params.plan.grid;
  const Kernel kernel = kernel_of(params.output, params.row_type, params.padded, grid.units);
  kernel<<<grid.num_blocks, grid.threads, static_cast<size_t>(params.plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
