// The CPU targets of the ops (names and signatures: jax_ep/_primitives.py).
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jax_ep_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_float8_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_routed_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_dispatch_routed_float8_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_notify_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_combine_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_combine_grad_cpu(XLA_FFI_CallFrame* frame);
}
