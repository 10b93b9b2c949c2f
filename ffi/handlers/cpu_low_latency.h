// The low-latency targets on CPU: fused operations and their halves (names and signatures:
// jax_ep/_low_latency_primitives.py).
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jax_ep_ll_dispatch_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_dispatch_start_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_dispatch_done_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_start_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_done_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_grad_cpu(XLA_FFI_CallFrame* frame);
}
