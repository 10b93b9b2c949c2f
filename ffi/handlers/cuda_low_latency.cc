// As cuda_handlers.cc: one kernel each, nothing read of what is on the device, so that a replayed
// graph needs none of this. A ticket stays on the device, from the start's kernel to the done's.
#include "handlers/cuda_low_latency.h"

#include "cuda/ll_combine.h"
#include "cuda/ll_combine_grad.h"
#include "cuda/ll_dispatch.h"
#include "handlers/cuda_call.h"
#include "handlers/low_latency_operands.h"
#include "handlers/shapes.h"

namespace jax_ep::gpu {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;

// A start and its done are two sites of a program, whose tags must be equal: the done compares
// peers' tags, which are those of their starts, with its own.
template <class Operands>
OpTag tag_of(const CudaCall& call, const CudaResolved& resolved, const Operands& operands) {
  return operands.tag(operands.half == Half::kWhole ? site_for_tags(call, resolved) : Site{0});
}

template <class Operands>
LlTurn turn_of(const Operands& operands) {
  LlTurn turn = LlTurn::fused();
  if (operands.half == Half::kStart) turn = LlTurn::start(data<uint32_t>(*operands.ticket));
  if (operands.half == Half::kDone) turn = LlTurn::done(data<const uint32_t>(*operands.ticket));
  turn.order_token = data<float>(operands.token.out);
  return turn;
}

void set_results(LlDispatchParams& params, const LowLatencyReceived& received) {
  params.tokens = data<char>(received.tokens);
  params.weights = data<float>(received.weights);
  params.group_sizes = data<int32_t>(received.counts);
  params.valid_sizes = params.group_sizes;  // equal without alignment
  params.num_dropped = data<int32_t>(received.num_dropped);
  params.recv_rows = data<int32_t>(received.recv_rows);
}

void set_stats(LlDispatchParams& params, const LowLatencyStats& stats) {
  params.expert_tokens_before = data<const int32_t>(stats.tokens_per_expert);
  params.expert_tokens = data<int32_t>(stats.tokens_per_expert_out);
  params.waited_ns_before = data<const uint32_t>(stats.waited_ns);
  params.waited_ns = data<uint32_t>(stats.waited_ns_out);
}

// A start has no tokens: rows travel alike whatever its done makes of them.
LlOutput output_of(const Float8Operands& float8) {
  if (!float8.quantized()) return LlOutput::kRows;
  return float8.scales ? LlOutput::kValues : LlOutput::kDequantized;
}

ffi::Error dispatch(const CudaCall& call, const LowLatencyDispatchOperands& operands) {
  const CudaResolved resolved = admit(call, OpKind::kDispatch, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  const CudaRank& rank = rank_of(resolved);
  LlDispatchParams params{};
  params.op = rank.operation(tag_of(call, resolved, operands), kDispatchChannel,
                             data<const int32_t>(operands.rank));
  params.output = output_of(operands.float8);
  params.power_of_two_scales = operands.float8.format() == ScaleFormat::kPowerOfTwo;
  params.scales = operands.float8.scales_data();
  params.row_type = *row_type_of(operands.x.element_type());
  params.turn = turn_of(operands);
  params.plan = plan_ll_dispatch(resolved.buffer->shape(), params.turn, operands.num_tokens(),
                                 params.output, params.row_type, rank.num_sms(), rank.limits());
  params.x = data<const char>(operands.x);
  params.topk_idx = data<const int32_t>(operands.topk_idx);
  params.topk_weights = data<const float>(operands.topk_weights);
  if (operands.clean_topk_idx) params.sanitised_idx = data<int32_t>(*operands.clean_topk_idx);
  if (operands.received) set_results(params, *operands.received);
  if (operands.with_stats()) set_stats(params, *operands.stats);
  params.capacity = operands.num_rows();
  params.padded = operands.padded;
  params.zero_tail = false;
  return launch_on(call, *resolved.buffer, OpKind::kDispatch, params, launch_ll_dispatch);
}

ffi::Error combine(const CudaCall& call, const LowLatencyCombineOperands& operands) {
  const CudaResolved resolved = admit(call, OpKind::kCombine, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  const CudaRank& rank = rank_of(resolved);
  LlCombineParams params{};
  params.op = rank.operation(tag_of(call, resolved, operands), kCombineChannel,
                             data<const int32_t>(operands.rank));
  params.plan = plan_ll_combine(resolved.buffer->shape(), operands.num_tokens(), rank.num_sms(),
                                rank.limits());
  params.turn = turn_of(operands);
  params.y = data<const char>(operands.y);
  if (operands.weighted) params.row_weights = data<const float>(operands.row_weights);
  if (operands.with_scalars) {
    params.row_scalars = data<const float>(*operands.row_scalars);
    params.scalars = data<float>(*operands.scalars);
  }
  params.topk_idx = data<const int32_t>(operands.topk_idx);
  params.recv_rows = data<const int32_t>(operands.recv_rows);
  if (operands.out) params.out = data<char>(*operands.out);
  params.capacity = operands.num_rows();
  params.row_type = operands.row_type();
  return launch_on(call, *resolved.buffer, OpKind::kCombine, params, launch_ll_combine);
}

ffi::Error combine_grad(const CudaCall& call, const LowLatencyCombineGradOperands& operands) {
  const CudaResolved resolved = admit(call, OpKind::kCombineGrad, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  const CudaRank& rank = rank_of(resolved);
  const CombineGradOperands& base = operands.base;
  LlCombineGradParams params{};
  params.turn = LlTurn::fused();
  params.turn.order_token = data<float>(operands.token.out);
  params.num_blocks = plan_ll_combine_grad(operands.num_tokens(), rank.num_sms());
  CombineGradParams& grad = params.grad;
  grad.op = rank.operation(operands.tag(site_for_tags(call, resolved)), kDispatchChannel,
                           data<const int32_t>(base.rank));
  grad.g = data<const char>(base.g);
  grad.topk_idx = data<const int32_t>(base.topk_idx);
  grad.recv_rows = data<const int32_t>(base.recv_rows);
  grad.row_weights = data<const float>(base.row_weights);
  grad.y = data<const char>(base.y);
  grad.d_y = data<char>(base.d_y);
  grad.d_row_weights = data<float>(base.d_row_weights);
  grad.capacity = base.capacity();
  grad.expert_alignment = base.expert_alignment;
  grad.zero_tail = base.zero_tail;
  grad.row_type = base.row_type();
  return launch_on(call, *resolved.buffer, OpKind::kCombineGrad, params, launch_ll_combine_grad);
}

// A handler: reads the operands of a target and runs the operation.
template <class Operands, Half half, ffi::Error (*run)(const CudaCall&, const Operands&)>
ffi::Error handle(Site* site, cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const FlatCall flat(args, rets, attributes);
  const auto operands = Operands::read(flat, half);
  if (!operands) return to_error(wrong_arity_text());
  const CudaCall call{
      site, stream, ordinal, {flat.attribute("buffer_id"), flat.attribute("fingerprint")}};
  return without_exceptions<Operands, run>(call, *operands);
}

template <Half half>
constexpr auto handle_dispatch = handle<LowLatencyDispatchOperands, half, dispatch>;
template <Half half>
constexpr auto handle_combine = handle<LowLatencyCombineOperands, half, combine>;
constexpr auto handle_combine_grad =
    handle<LowLatencyCombineGradOperands, Half::kWhole, combine_grad>;

auto bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Site>>()
      .Ctx<CudaStream>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<ffi::Dictionary>();
}

}  // namespace

}  // namespace jax_ep::gpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_cuda,
                              jax_ep::gpu::handle_dispatch<jax_ep::Half::kWhole>,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_start_cuda,
                              jax_ep::gpu::handle_dispatch<jax_ep::Half::kStart>,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_done_cuda,
                              jax_ep::gpu::handle_dispatch<jax_ep::Half::kDone>,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_cuda,
                              jax_ep::gpu::handle_combine<jax_ep::Half::kWhole>,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_start_cuda,
                              jax_ep::gpu::handle_combine<jax_ep::Half::kStart>,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_done_cuda,
                              jax_ep::gpu::handle_combine<jax_ep::Half::kDone>, jax_ep::gpu::bind(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_grad_cuda, jax_ep::gpu::handle_combine_grad,
                              jax_ep::gpu::bind(), {xla::ffi::Traits::kCmdBufferCompatible});
