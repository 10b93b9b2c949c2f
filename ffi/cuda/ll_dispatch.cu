#include <algorithm>

#include "cuda/ll_dispatch.h"
#include "cuda/ll_dispatch_done.cuh"
#include "cuda/ll_dispatch_rows.cuh"
#include "cuda/ll_dispatch_start.cuh"

namespace jax_ep::gpu {
namespace {

// All threads of one block: what the outputs of an aborted operation hold.
__device__ __noinline__ void spoil_ll_dispatch(const LlDispatchParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const WindowShape& shape = p.op.layout.shape;
  const int64_t entries = int64_t{p.op.num_tokens} * shape.num_experts_per_tok;
  if (p.turn.send) fill(p.sanitised_idx, entries, -1, thread, threads);
  if (!p.turn.receive) return;
  if (p.output == LlOutput::kValues) {
    constexpr uint32_t kNans = 0x7F7F7F7Fu;
    fill(reinterpret_cast<uint32_t*>(p.tokens), p.capacity * p.plan.row.output_bytes / 4, kNans,
         thread, threads);
    fill_nan(reinterpret_cast<char*>(p.scales), p.capacity * p.plan.row.num_scales * 4,
             RowType::kFloat32);
  } else {
    fill_nan(p.tokens, p.capacity * shape.row_bytes, p.row_type);
  }
  fill_nan(reinterpret_cast<char*>(p.weights), p.capacity * 4, RowType::kFloat32);
  fill(p.group_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.valid_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.num_dropped, 1, 0, thread, threads);
  fill(p.recv_rows, entries * shape.num_ranks, -1, thread, threads);
  for (int e = thread; p.expert_tokens != nullptr && e < shape.experts_per_rank(); e += threads) {
    p.expert_tokens[e] = p.expert_tokens_before[e];
  }
  for (int r = thread; p.waited_ns != nullptr && r < shape.num_ranks; r += threads) {
    p.waited_ns[r] = p.waited_ns_before[r];
  }
}

// ---- The kernels.

template <class Transport, class Wire, class Places>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_dispatch_kernel(const __grid_constant__ LlDispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlDispatchBlock block;
  LlCounters counters = LlCounters::ask(p.op);
  const LlOpening opening = LlOpening::read(p.op, p.turn, state);
  LlContext ctx{{p.op, state, /*epoch=*/0}, verdict};  // not known yet
  LlDispatch<Transport, Wire, Places> work(ctx, p, shared, block);
  work.prepare();
  counters.look();
  ctx.epoch = counters.epoch(p.turn);
  const bool begun = begin_ll(ctx, p.turn, counters, opening);
  if (begun) work.run();
  const bool in_device_memory = p.plan.masks_offset < 0 || p.plan.bases_offset < 0;
  finish_ll(
      ctx, p.turn, begun, in_device_memory, [&] { spoil_ll_dispatch(p); },
      [&] { clear_channel_state(p.op); });
}

template <class Wire>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_dispatch_start_kernel(const __grid_constant__ LlDispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlDispatchBlock block;
  const LlTurn turn = p.turn.known(/*sends=*/true, /*receives=*/false);
  LlContext ctx{{p.op, state, /*epoch=*/0}, verdict};  // not known yet
  LlDispatchStart<Wire> work(ctx, p, shared, block);
  LlCounters counters = LlCounters::ask(p.op);
  const LlOpening opening = LlOpening::read(p.op, turn, state);
  work.ask_entries();
  work.ask();
  work.find_destinations();
  counters.look();
  ctx.epoch = counters.epoch(turn);
  const bool ready = greet_peers(ctx, turn, counters, opening);
  work.encode();
  const bool begun = __syncthreads_and(ready);
  if (begun) work.run();
  finish_ll(ctx, turn, begun, /*needs_last=*/false, [&] { spoil_ll_dispatch(p); }, [] {});
}

template <class Wire, class Places>
__global__ void __launch_bounds__(kLlMaxThreads, kLlBlocksPerSm)
    ll_dispatch_done_kernel(const __grid_constant__ LlDispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ LlDispatchBlock block;
  const LlTurn turn = p.turn.known(/*sends=*/false, /*receives=*/true);
  LlContext ctx{{p.op, state, /*epoch=*/0}, verdict};  // not known yet
  LlDispatchDone<Wire, Places> work(ctx, p, shared, block);
  LlCounters counters = LlCounters::ask(p.op);
  const bool open = p.op.peers->open != 0;
  const char* const window = p.op.peers->window[p.op.rank];
  const LlOpening opening = LlOpening::read(p.op, turn, state);
  work.ask();
  counters.look();
  ctx.epoch = counters.epoch(turn);
  const bool here = open && work.look(window);  // a closed buffer has no window
  const bool ready = greet_peers(ctx, turn, counters, opening);
  work.encode();
  const bool told = __syncthreads_and(ready && here);
  const bool begun = told || __syncthreads_and(ready);
  if (begun) work.run(told);
  finish_ll(ctx, turn, begun, /*needs_last=*/false, [&] { spoil_ll_dispatch(p); }, [] {});
}

using Kernel = void (*)(LlDispatchParams);

// Halves have kernels of their own where every block has one item at most and room for all in
// shared memory, and nothing is put.
enum class Launch { kAny, kStart, kDone };

template <class Wire>
Kernel kernel_of(Launch launch, bool padded) {
  if constexpr (!GroupTransport::kPuts) {
    if (launch == Launch::kStart) return ll_dispatch_start_kernel<Wire>;
    if (launch == Launch::kDone) {
      return padded ? ll_dispatch_done_kernel<Wire, PaddedPlaces<true>>
                    : ll_dispatch_done_kernel<Wire, CompactPlaces<true>>;
    }
  }
  return padded ? ll_dispatch_kernel<GroupTransport, Wire, PaddedPlaces<false>>
                : ll_dispatch_kernel<GroupTransport, Wire, CompactPlaces<false>>;
}

template <bool kDequantizes>
Kernel quantized_kernel_of(Launch launch, RowType type, bool padded) {
  switch (type) {
    case RowType::kFloat32:
      return kernel_of<QuantizedWire<RowType::kFloat32, kDequantizes>>(launch, padded);
    case RowType::kBFloat16:
      return kernel_of<QuantizedWire<RowType::kBFloat16, kDequantizes>>(launch, padded);
    case RowType::kFloat16:
      return kernel_of<QuantizedWire<RowType::kFloat16, kDequantizes>>(launch, padded);
  }
  return nullptr;
}

Kernel kernel_of(Launch launch, LlOutput output, RowType type, bool padded, int units) {
  if (output == LlOutput::kRows) {
    return units == 1 ? kernel_of<PlainWire<1>>(launch, padded)
                      : kernel_of<PlainWire<kLlMaxUnits>>(launch, padded);
  }
  const bool dequantizes = output == LlOutput::kDequantized;
  return dequantizes ? quantized_kernel_of<true>(launch, type, padded)
                     : quantized_kernel_of<false>(launch, type, padded);
}

Launch launch_of(const LlDispatchParams& params) {
  const LlDispatchPlan& plan = params.plan;
  const LlTurn& turn = params.turn;
  const bool one_item = plan.grid.num_items(params.op.num_tokens) <= plan.grid.num_blocks;
  const bool in_shared = plan.masks_offset >= 0 && plan.bases_offset >= 0;
  if (!one_item || !in_shared || (turn.send && turn.receive)) return Launch::kAny;
  return turn.send ? Launch::kStart : Launch::kDone;
}

LlRowSizes row_sizes(const WindowShape& shape, LlOutput output, RowType row_type) {
  LlRowSizes row{};
  row.bytes = static_cast<int>(shape.row_bytes);
  row.hidden = row.bytes / row_type_bytes(row_type);
  row.output_bytes = output == LlOutput::kValues ? row.hidden : row.bytes;
  row.num_scales = num_scales(row.hidden);
  row.scales_offset = static_cast<int>(wire_scales_offset(row.hidden));
  return row;
}

}  // namespace

LlDispatchPlan plan_ll_dispatch(const WindowShape& shape, const LlTurn& turn, int num_tokens,
                                LlOutput output, RowType row_type, int num_sms,
                                const DeviceLimits& limits) {
  constexpr int64_t kStaticBytes = 2048;
  constexpr int64_t kManyBytes = 1 << 20;  // some microseconds of the link
  LlDispatchPlan plan{};
  plan.by_experts_per_tok = LlDivisor::of(shape.num_experts_per_tok);
  plan.by_experts_per_rank = LlDivisor::of(shape.experts_per_rank());
  plan.experts_per_rank = shape.experts_per_rank();
  plan.ranks_at_once = kWarp / shape.num_experts_per_tok;
  plan.row = row_sizes(shape, output, row_type);
  plan.mask_words = std::max(1, (num_tokens + 31) / 32);
  plan.list_entries = static_cast<int>(align_up(shape.num_experts_per_tok, kListUnit));
  SharedLayout layout(limits.max_shared_bytes - kStaticBytes);
  plan.rows_offset = layout.take(int64_t{4} * shape.num_ranks * plan.list_entries);
  plan.masks_offset = layout.take_if_room(int64_t{4} * shape.num_experts * plan.mask_words);
  plan.bases_offset =
      layout.take_if_room(4 * words_of_places(shape.num_experts, shape.experts_per_rank()));
  plan.shared_bytes = layout.used();
  const int columns = (output == LlOutput::kRows ? plan.row.bytes : plan.row.scales_offset) / 16;
  const int most_units = output == LlOutput::kRows ? kLlMaxUnits : 1;
  const auto grid_of = [&](LlBlocks blocks) {
    return plan_ll_grid(num_tokens, columns, most_units, blocks, plan.shared_bytes + kStaticBytes,
                        num_sms, limits);
  };
  plan.grid = grid_of(LlBlocks::kSmall);
  const LlGrid large = grid_of(LlBlocks::kLarge);
  const bool is_half = !(turn.send && turn.receive);
  if (is_half && large.num_items(num_tokens) <= large.num_blocks) plan.grid = large;
  const int64_t wire_bytes =
      int64_t{num_tokens} * columns * 16 * std::min(shape.num_ranks - 1, shape.num_experts_per_tok);
  plan.own_rows_first =
      wire_bytes >= kManyBytes && plan.grid.num_items(num_tokens) <= plan.grid.num_blocks;
  return plan;
}

cudaError_t prepare_ll_dispatch() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (const LlOutput output : {LlOutput::kRows, LlOutput::kValues, LlOutput::kDequantized}) {
      for (const bool padded : {false, true}) {
        for (int units = 1; units <= kLlMaxUnits; ++units) {
          for (const Launch launch : {Launch::kAny, Launch::kStart, Launch::kDone}) {
            const Kernel kernel = kernel_of(launch, output, type, padded, units);
            const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_ll_dispatch(const LlDispatchParams& params, cudaStream_t stream) {
  const LlGrid& grid = params.plan.grid;
  const Kernel kernel =
      kernel_of(launch_of(params), params.output, params.row_type, params.padded, grid.units);
  kernel<<<grid.num_blocks, grid.threads, static_cast<size_t>(params.plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
