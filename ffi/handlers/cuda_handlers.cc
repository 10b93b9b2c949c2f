// Handlers on GPUs check what the host knows and launch a kernel, or two. They allocate nothing,
// wait for nothing and read no device memory (the kernel compares the rank operand), so that XLA
// may record them once and replay the launches as a graph.
#include "handlers/cuda_handlers.h"

#include <chrono>
#include <string>
#include <type_traits>

#include "cuda/combine.h"
#include "cuda/combine_grad.h"
#include "cuda/dispatch.h"
#include "cuda/notify.h"
#include "handlers/cuda_call.h"
#include "handlers/notify_operands.h"

namespace jax_ep::gpu {

namespace ffi = xla::ffi;

namespace {

void require_alignment(CudaResolved& resolved, const char* op, int64_t expert_alignment) {
  if (!resolved.error.empty() || expert_alignment <= kMaxAlignment) return;
  resolved.error = std::string("EpUsageError: ") + op +
                   ": expert_alignment=" + std::to_string(expert_alignment) + " is more than the " +
                   std::to_string(kMaxAlignment) + " that GPUs take. Lower expert_alignment.";
}

// What the kernels' parameters have in common. plan: plan_<op>() of the op.
template <class Params, class Operands, class Plan>
Params make_params(const OpTag& tag, const CudaResolved& resolved, Channel channel,
                   const Operands& operands,
                   Plan (*plan)(const WindowShape&, int, const DeviceLimits&)) {
  const CudaRank& rank = rank_of(resolved);
  Params params{};
  params.op = rank.operation(tag, channel, data<const int32_t>(operands.rank));
  params.plan = plan(resolved.buffer->shape(), rank.num_sms(), rank.limits());
  params.topk_idx = data<const int32_t>(operands.topk_idx);
  params.recv_rows = data<std::remove_pointer_t<decltype(params.recv_rows)>>(operands.recv_rows);
  params.capacity = operands.capacity();
  params.row_type = operands.row_type();
  return params;
}

// Rows are packed into a result that nobody reads: handlers have no memory of their own.
void set_float8(DispatchParams& params, const CudaResolved& resolved,
                const Float8Operands& float8) {
  const CudaRank& rank = rank_of(resolved);
  params.hidden = resolved.buffer->options().hidden;
  params.packed = data<char>(*float8.packed);
  params.scales = float8.scales_data();
  params.power_of_two_scales = float8.format() == ScaleFormat::kPowerOfTwo;
  WindowShape& shape = params.op.layout.shape;
  shape.row_bytes = packed_row_bytes(params.hidden);
  params.plan = plan_packed_dispatch(shape, rank.num_sms(), rank.limits());
}

DispatchParams dispatch_params(const OpTag& tag, const CudaResolved& resolved,
                               const DispatchOperands& operands) {
  auto params =
      make_params<DispatchParams>(tag, resolved, kDispatchChannel, operands, plan_dispatch);
  params.x = data<const char>(operands.x);
  params.topk_weights = data<const float>(operands.topk_weights);
  params.tokens = data<char>(operands.tokens);
  params.weights = data<float>(operands.weights);
  params.group_sizes = data<int32_t>(operands.group_sizes);
  params.valid_sizes = data<int32_t>(operands.valid_sizes);
  params.num_dropped = data<int32_t>(operands.num_dropped);
  params.sanitised_idx = data<int32_t>(operands.clean_topk_idx);
  if (!operands.expanded) params.row_map = data<int32_t>(operands.row_map);
  params.expert_alignment = operands.expert_alignment;
  params.zero_tail = operands.zero_tail;
  if (operands.float8.quantized()) set_float8(params, resolved, operands.float8);
  return params;
}

ffi::Error dispatch(const CudaCall& call, const DispatchOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kDispatch, operands);
  require_alignment(resolved, "dispatch", operands.expert_alignment);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  const DispatchParams params =
      dispatch_params(operands.tag(site_for_tags(call, resolved)), resolved, operands);
  return launch_on(call, *resolved.buffer, OpKind::kDispatch, params, launch_dispatch);
}

ffi::Error dispatch_routed(const CudaCall& call, const RoutedDispatchOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kDispatch, operands);
  require_alignment(resolved, "dispatch", operands.base.expert_alignment);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  DispatchParams params =
      dispatch_params(operands.tag(site_for_tags(call, resolved)), resolved, operands.base);
  params.sanitised_idx = nullptr;
  params.row_index = data<const int32_t>(operands.row_index);
  params.counts = data<const int32_t>(operands.counts);
  return launch_on(call, *resolved.buffer, OpKind::kDispatch, params, launch_dispatch);
}

ffi::Error notify(const CudaCall& call, const NotifyOperands& operands) {
  const CudaResolved resolved = admit(call, OpKind::kNotify, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  const CudaRank& rank = rank_of(resolved);
  NotifyParams params{};
  params.op = rank.operation(operands.tag(site_for_tags(call, resolved)), kDispatchChannel,
                             data<const int32_t>(operands.rank));
  params.plan =
      plan_notify(resolved.buffer->shape(), operands.num_tokens(), rank.num_sms(), rank.limits());
  params.topk_idx = data<const int32_t>(operands.topk_idx);
  params.ticket = data<const uint32_t>(operands.ticket);
  params.sanitised_idx = data<int32_t>(operands.clean_topk_idx);
  params.row_index = data<int32_t>(operands.row_index);
  params.counts = data<int32_t>(operands.counts);
  params.counters = resolved.buffer->notices().counters(resolved.place.group, resolved.place.rank);
  ffi::Error error = launch_on(call, *resolved.buffer, OpKind::kNotify, params, launch_notify);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  resolved.buffer->notify_returned_ns = std::chrono::nanoseconds(now).count();
  return error;
}

ffi::Error combine(const CudaCall& call, const CombineOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kCombine, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  auto params = make_params<CombineParams>(operands.tag(site_for_tags(call, resolved)), resolved,
                                           kCombineChannel, operands, plan_combine);
  params.y = data<const char>(operands.y);
  params.y_by_message = !operands.expanded;
  if (operands.weighted) params.row_weights = data<const float>(operands.row_weights);
  if (operands.with_scalars) {
    params.row_scalars = data<const float>(operands.row_scalars);
    params.scalars = data<float>(operands.scalars);
  }
  params.out = data<char>(operands.out);
  return launch_on(call, *resolved.buffer, OpKind::kCombine, params, launch_combine);
}

ffi::Error combine_grad(const CudaCall& call, const CombineGradOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kCombineGrad, operands);
  require_alignment(resolved, "combine_grad", operands.expert_alignment);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  auto params =
      make_params<CombineGradParams>(operands.tag(site_for_tags(call, resolved)), resolved,
                                     kDispatchChannel, operands, plan_combine_grad);
  params.g = data<const char>(operands.g);
  params.row_weights = data<const float>(operands.row_weights);
  params.y = data<const char>(operands.y);
  params.d_y = data<char>(operands.d_y);
  params.d_row_weights = data<float>(operands.d_row_weights);
  params.expert_alignment = operands.expert_alignment;
  params.zero_tail = operands.zero_tail;
  return launch_on(call, *resolved.buffer, OpKind::kCombineGrad, params, launch_combine_grad);
}

constexpr auto decoded_dispatch =
    decode_dispatch<cudaStream_t, ffi::Error, without_exceptions<DispatchOperands, dispatch>>;
constexpr auto decoded_dispatch_routed =
    decode_routed_dispatch<cudaStream_t, ffi::Error,
                           without_exceptions<RoutedDispatchOperands, dispatch_routed>>;
constexpr auto decoded_float8_dispatch =
    decode_float8_dispatch<cudaStream_t, ffi::Error,
                           without_exceptions<DispatchOperands, dispatch>>;
constexpr auto decoded_routed_float8_dispatch =
    decode_routed_float8_dispatch<cudaStream_t, ffi::Error,
                                  without_exceptions<RoutedDispatchOperands, dispatch_routed>>;
constexpr auto decoded_notify =
    decode_notify<cudaStream_t, ffi::Error, without_exceptions<NotifyOperands, notify>>;
constexpr auto decoded_combine =
    decode_combine<cudaStream_t, ffi::Error, without_exceptions<CombineOperands, combine>>;
constexpr auto decoded_combine_grad =
    decode_combine_grad<cudaStream_t, ffi::Error,
                        without_exceptions<CombineGradOperands, combine_grad>>;

}  // namespace

}  // namespace jax_ep::gpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_instantiate_cuda, jax_ep::instantiate_site,
                              xla::ffi::Ffi::BindInstantiate().Attrs<xla::ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_cuda, jax_ep::gpu::decoded_dispatch,
                              jax_ep::bind_dispatch<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_routed_cuda, jax_ep::gpu::decoded_dispatch_routed,
                              jax_ep::bind_routed_dispatch<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_float8_cuda, jax_ep::gpu::decoded_float8_dispatch,
                              jax_ep::bind_float8_dispatch<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_routed_float8_cuda,
                              jax_ep::gpu::decoded_routed_float8_dispatch,
                              jax_ep::bind_routed_float8_dispatch<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_notify_cuda, jax_ep::gpu::decoded_notify,
                              jax_ep::bind_notify<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_cuda, jax_ep::gpu::decoded_combine,
                              jax_ep::bind_combine<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_grad_cuda, jax_ep::gpu::decoded_combine_grad,
                              jax_ep::bind_combine_grad<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
