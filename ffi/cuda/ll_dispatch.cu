#include <algorithm>

#include "cuda/ll_dispatch.h"
#include "cuda/ll_dispatch_rows.cuh"

namespace jax_ep::gpu {
namespace {

// ---- The kernels.

template <class Transport, class Wire>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_dispatch_kernel(const __grid_constant__ LlDispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlDispatchBlock block;
  const LlCounters counters = LlCounters::read(p.op);
  const LlOpening opening = LlOpening::read(p.op, p.turn);
  const OpContext ctx{p.op, state, counters.epoch(p.turn)};
  LlDispatch<Transport, Wire> work(ctx, p, shared, block);
  work.prepare();
  const bool begun = begin_ll(ctx, p.turn, counters, opening);
  if (begun && p.padded) work.run(PaddedPlaces(ctx, p, shared), counters);
  if (begun && !p.padded) work.run(CompactPlaces(ctx, p, shared), counters);
  const bool alone = p.turn.receive && !p.turn.send;
  const bool in_device_memory = p.plan.masks_offset < 0 || p.plan.bases_offset < 0;
  finish_ll(
      ctx, counters, begun, alone || in_device_memory, [&] { spoil_ll_dispatch(p); },
      [&] {
        if (alone) send_credits(ctx);
        if (!in_device_memory) return;
        auto* words = reinterpret_cast<uint32_t*>(p.op.state());
        fill(words, static_cast<int64_t>(sizeof(ChannelState) / 4), 0u,
             static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
      });
}

using Kernel = void (*)(LlDispatchParams);

template <class Transport>
Kernel kernel_of(LlOutput output, RowType type) {
  if (output == LlOutput::kRows) return ll_dispatch_kernel<Transport, PlainWire>;
  switch (type) {
    case RowType::kFloat32:
      return ll_dispatch_kernel<Transport, QuantizedWire<RowType::kFloat32>>;
    case RowType::kBFloat16:
      return ll_dispatch_kernel<Transport, QuantizedWire<RowType::kBFloat16>>;
    case RowType::kFloat16:
      return ll_dispatch_kernel<Transport, QuantizedWire<RowType::kFloat16>>;
  }
  return nullptr;
}

}  // namespace

LlDispatchPlan plan_ll_dispatch(const WindowShape& shape, int num_tokens, LlOutput output,
                                RowType row_type, int num_sms, const DeviceLimits& limits) {
  constexpr int64_t kStaticBytes = 2048;
  LlDispatchPlan plan{};
  plan.mask_words = std::max(1, (num_tokens + 31) / 32);
  SharedLayout layout(limits.max_shared_bytes - kStaticBytes);
  plan.rows_offset = layout.take(int64_t{4} * shape.num_ranks * shape.num_experts_per_tok);
  plan.masks_offset = layout.take_if_room(int64_t{4} * shape.num_experts * plan.mask_words);
  plan.bases_offset =
      layout.take_if_room(4 * Placement::words(shape.num_experts, shape.experts_per_rank()));
  plan.shared_bytes = layout.used();
  const int64_t columns =
      output == LlOutput::kRows
          ? shape.row_bytes / 16
          : align_up(shape.row_bytes / row_type_bytes(row_type), kQuantizedUnit) / kQuantizedUnit;
  plan.grid = plan_ll_grid(num_tokens, static_cast<int>(columns), plan.shared_bytes + kStaticBytes,
                           num_sms, limits);
  return plan;
}

cudaError_t prepare_ll_dispatch() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (const LlOutput output : {LlOutput::kRows, LlOutput::kValues}) {
      const Kernel kernel = kernel_of<PeerTransport>(output, type);
      const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_ll_dispatch(const LlDispatchParams& params, cudaStream_t stream) {
  const LlGrid& grid = params.plan.grid;
  const Kernel kernel = kernel_of<PeerTransport>(params.output, params.row_type);
  kernel<<<grid.num_blocks, grid.threads, static_cast<size_t>(params.plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
