// What a handler on GPUs does before and after it has an operation's parameters: find the buffer,
// see that it is healthy, launch.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "cuda/cuda_buffer.h"
#include "handlers/call.h"
#include "handlers/operands.h"

namespace jax_ep::gpu {

using CudaCall = HandlerCall<cudaStream_t>;
using CudaResolved = Resolved<CudaBuffer>;
using CudaStream = xla::ffi::PlatformStream<cudaStream_t>;

// The buffer and the place of the call's device in it, or why no operation can start there.
CudaResolved resolve_healthy(const CudaCall& call, OpKind op);

// What all ops do first: as above, and check the operands.
template <class Operands>
CudaResolved admit(const CudaCall& call, OpKind op, const Operands& operands) {
  CudaResolved resolved = resolve_healthy(call, op);
  if (!resolved.error.empty()) return resolved;
  const CudaBuffer& buffer = *resolved.buffer;
  resolved.error = operands.error(shape_of(buffer.shape(), buffer.options()));
  return resolved;
}

inline const CudaRank& rank_of(const CudaResolved& resolved) {
  return resolved.buffer->group(resolved.place.group).rank(resolved.place.rank);
}

// Processes instantiate call sites each in its own order, so that their tags cannot tell sites
// apart.
inline Site site_for_tags(const CudaCall& call, const CudaResolved& resolved) {
  return resolved.buffer->is_shared() ? Site{0} : *call.site;
}

// Before a launch: counts it, and whether XLA is recording it for a graph.
void count_launch(const CudaCall& call, CudaBuffer& buffer);
// After it. One that failed stops the other ranks.
xla::ffi::Error after_launch(const CudaCall& call, CudaBuffer& buffer, OpKind op,
                             cudaError_t status);

// launch: launch_<op>(params, stream) of one op.
template <class Params>
xla::ffi::Error launch_on(const CudaCall& call, CudaBuffer& buffer, OpKind op, const Params& params,
                          cudaError_t (*launch)(const Params&, cudaStream_t)) {
  count_launch(call, buffer);
  return after_launch(call, buffer, op, launch(params, call.context));
}

// XLA calls handlers from code that knows no exceptions.
template <class Operands, xla::ffi::Error (*run)(const CudaCall&, const Operands&)>
xla::ffi::Error without_exceptions(const CudaCall& call, const Operands& operands) {
  try {
    return run(call, operands);
  } catch (const std::exception& error) {
    return to_error(std::string("EpError: ") + error.what());
  }
}

}  // namespace jax_ep::gpu
