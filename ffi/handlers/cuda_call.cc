#include "handlers/cuda_call.h"

namespace jax_ep::gpu {

namespace ffi = xla::ffi;

CudaResolved resolve_healthy(const CudaCall& call, OpKind op) {
  CudaResolved resolved =
      resolve(find_cuda_buffer(call.buffer.id), call.buffer, call.device_ordinal);
  if (!resolved.error.empty()) {
    // The device is the trouble, not the program: other ranks may have started.
    if (resolved.buffer != nullptr) resolved.buffer->abort(op, resolved.error);
    return resolved;
  }
  if (const auto refusal = resolved.buffer->group(resolved.place.group).refusal()) {
    resolved.error = *refusal;
  }
  return resolved;
}

void count_launch(const CudaCall& call, CudaBuffer& buffer) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(call.context, &capture);
  buffer.num_launches.fetch_add(1, std::memory_order_relaxed);
  if (capture != cudaStreamCaptureStatusNone) {
    buffer.num_captures.fetch_add(1, std::memory_order_relaxed);
  }
}

ffi::Error after_launch(const CudaCall& call, CudaBuffer& buffer, OpKind op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  const std::string error = std::string("EpError: ") + op_name(op) + " did not start on GPU " +
                            std::to_string(call.device_ordinal) + ": " + cudaGetErrorString(status);
  buffer.abort(op, error);
  return to_error(error);
}

}  // namespace jax_ep::gpu
