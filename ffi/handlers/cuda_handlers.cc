// Handlers on GPUs check what the host knows and launch one kernel. They allocate nothing, wait for
// nothing and read no device memory (the kernel compares the rank operand), so that XLA may record
// them once and replay the launches as a graph.
#include "handlers/cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <exception>
#include <string>
#include <type_traits>

#include "cuda/combine.h"
#include "cuda/combine_grad.h"
#include "cuda/cuda_buffer.h"
#include "cuda/dispatch.h"
#include "handlers/call.h"
#include "handlers/operands.h"

namespace jax_ep::gpu {

namespace ffi = xla::ffi;

namespace {

using CudaCall = HandlerCall<cudaStream_t>;
using CudaResolved = Resolved<CudaBuffer>;
using CudaStream = ffi::PlatformStream<cudaStream_t>;

// What all ops do first: find the buffer, see that it is healthy, check the operands.
template <class Operands>
CudaResolved admit(const CudaCall& call, OpKind op, const Operands& operands) {
  CudaResolved resolved =
      resolve(find_cuda_buffer(call.buffer.id), call.buffer, call.device_ordinal);
  if (!resolved.error.empty()) {
    // The device is the trouble, not the program: other ranks may have started.
    if (resolved.buffer != nullptr) resolved.buffer->abort(op, resolved.error);
    return resolved;
  }
  const CudaBuffer& buffer = *resolved.buffer;
  if (const auto refusal = buffer.group(resolved.place.group).refusal()) {
    resolved.error = *refusal;
  } else {
    resolved.error = operands.error(shape_of(buffer.shape(), buffer.options()));
  }
  return resolved;
}

void require_alignment(CudaResolved& resolved, const char* op, int64_t expert_alignment) {
  if (!resolved.error.empty() || expert_alignment <= kMaxAlignment) return;
  resolved.error = std::string("EpUsageError: ") + op +
                   ": expert_alignment=" + std::to_string(expert_alignment) + " is more than the " +
                   std::to_string(kMaxAlignment) + " that GPUs take. Lower expert_alignment.";
}

// What the kernels' parameters have in common. plan: plan_<op>() of the op.
template <class Params, class Operands, class Plan>
Params make_params(const CudaCall& call, const CudaResolved& resolved, Channel channel,
                   const Operands& operands,
                   Plan (*plan)(const WindowShape&, int, const DeviceLimits&)) {
  const CudaBuffer& buffer = *resolved.buffer;
  const CudaRank& rank = buffer.group(resolved.place.group).rank(resolved.place.rank);
  Params params{};
  params.op = rank.operation(operands.tag(*call.site), channel, data<const int32_t>(operands.rank));
  params.plan = plan(buffer.shape(), rank.num_sms(), rank.limits());
  params.topk_idx = data<const int32_t>(operands.topk_idx);
  params.recv_rows = data<std::remove_pointer_t<decltype(params.recv_rows)>>(operands.recv_rows);
  params.capacity = operands.capacity();
  params.row_type = operands.row_type();
  return params;
}

// launch: launch_<op>(params, stream) of one op.
template <class Params>
ffi::Error launch_on(const CudaCall& call, CudaBuffer& buffer, const Params& params,
                     cudaError_t (*launch)(const Params&, cudaStream_t)) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(call.context, &capture);
  buffer.num_launches.fetch_add(1, std::memory_order_relaxed);
  if (capture != cudaStreamCaptureStatusNone) {
    buffer.num_captures.fetch_add(1, std::memory_order_relaxed);
  }
  const cudaError_t status = launch(params, call.context);
  if (status == cudaSuccess) return ffi::Error::Success();
  const std::string error = std::string("EpError: ") + op_name(params.op.kind) +
                            " did not start on GPU " + std::to_string(call.device_ordinal) + ": " +
                            cudaGetErrorString(status);
  buffer.abort(params.op.kind, error);
  return to_error(error);
}

ffi::Error dispatch(const CudaCall& call, const DispatchOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kDispatch, operands);
  require_alignment(resolved, "dispatch", operands.expert_alignment);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  auto params =
      make_params<DispatchParams>(call, resolved, kDispatchChannel, operands, plan_dispatch);
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
  return launch_on(call, *resolved.buffer, params, launch_dispatch);
}

ffi::Error combine(const CudaCall& call, const CombineOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kCombine, operands);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  auto params = make_params<CombineParams>(call, resolved, kCombineChannel, operands, plan_combine);
  params.y = data<const char>(operands.y);
  params.y_by_message = !operands.expanded;
  if (operands.weighted) params.row_weights = data<const float>(operands.row_weights);
  if (operands.with_scalars) {
    params.row_scalars = data<const float>(operands.row_scalars);
    params.scalars = data<float>(operands.scalars);
  }
  params.out = data<char>(operands.out);
  return launch_on(call, *resolved.buffer, params, launch_combine);
}

ffi::Error combine_grad(const CudaCall& call, const CombineGradOperands& operands) {
  CudaResolved resolved = admit(call, OpKind::kCombineGrad, operands);
  require_alignment(resolved, "combine_grad", operands.expert_alignment);
  if (!resolved.error.empty()) return to_error(resolved.error);
  const DeviceGuard guard(call.device_ordinal);
  auto params =
      make_params<CombineGradParams>(call, resolved, kDispatchChannel, operands, plan_combine_grad);
  params.g = data<const char>(operands.g);
  params.row_weights = data<const float>(operands.row_weights);
  params.y = data<const char>(operands.y);
  params.d_y = data<char>(operands.d_y);
  params.d_row_weights = data<float>(operands.d_row_weights);
  params.expert_alignment = operands.expert_alignment;
  params.zero_tail = operands.zero_tail;
  return launch_on(call, *resolved.buffer, params, launch_combine_grad);
}

// XLA calls handlers from code that knows no exceptions.
template <class Operands, ffi::Error (*run)(const CudaCall&, const Operands&)>
ffi::Error without_exceptions(const CudaCall& call, const Operands& operands) {
  try {
    return run(call, operands);
  } catch (const std::exception& error) {
    return to_error(std::string("EpError: ") + error.what());
  }
}

constexpr auto decoded_dispatch =
    decode_dispatch<cudaStream_t, ffi::Error, without_exceptions<DispatchOperands, dispatch>>;
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_cuda, jax_ep::gpu::decoded_combine,
                              jax_ep::bind_combine<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_grad_cuda, jax_ep::gpu::decoded_combine_grad,
                              jax_ep::bind_combine_grad<jax_ep::gpu::CudaStream>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
