// What a handler on CPU does before and after it has an operation: find its buffer, present the
// operation, or refuse it.
#pragma once

#include "cpu/cpu_buffer.h"
#include "handlers/call.h"
#include "handlers/operands.h"

namespace jax_ep {

using CpuCall = HandlerCall<xla::ffi::RunId>;
using CpuResolved = Resolved<CpuBuffer>;

// axis_index: where the program's mesh has this device.
CpuResolved resolve(const CpuCall& call, int32_t axis_index);

// Presents the operation of this device; the future follows its end.
xla::ffi::Future start(const CpuCall& call, const CpuResolved& resolved, Operation operation);

// Fails this call with the error found, and the same run on every other rank of the buffer.
xla::ffi::Future refuse(const CpuCall& call, const CpuResolved& resolved);

}  // namespace jax_ep
