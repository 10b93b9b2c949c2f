// The CUDA targets of the ops (names and signatures: jax_ep/_primitives.py).
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jax_ep_instantiate_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_routed_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_float8_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_routed_float8_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_notify_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_combine_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_combine_grad_cuda(XLA_FFI_CallFrame* frame);
}
