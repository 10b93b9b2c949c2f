// The low-latency targets on GPUs (names and signatures: jax_ep/_low_latency_primitives.py).
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jax_ep_ll_dispatch_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_dispatch_start_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_dispatch_done_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_start_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_done_cuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_ep_ll_combine_grad_cuda(XLA_FFI_CallFrame* frame);
}
