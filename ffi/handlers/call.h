// What every handler needs before it may start an operation: which buffer, which rank, which call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cpu/cpu_buffer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// XLA instantiates a handler once for each instruction of an executable, whatever number of devices
// runs it: the state's id tells call sites apart, also where one traced call was inlined twice.
struct Site {
  static xla::ffi::TypeId id;
  static xla::ffi::TypeInfo info;
  uint64_t number;
};

xla::ffi::ErrorOr<std::unique_ptr<Site>> instantiate_site(xla::ffi::Dictionary attributes);

// Attributes that every op carries.
struct BufferRef {
  int64_t id;
  int64_t fingerprint;
};

// Facts about one call of a handler on one device.
struct Call {
  Site* site;
  int64_t run_id;
  int32_t device_ordinal;
  BufferRef buffer;
  int32_t axis_index;  // operand: where the program's mesh has this device
};

// The buffer and the place of this device in it, or the reason why the call cannot be served.
struct Resolved {
  std::shared_ptr<CpuBuffer> buffer;
  CpuBuffer::Place place{};
  std::string error;  // empty: fine
};
Resolved resolve(const Call& call);

// Presents the operation of this device; the future follows its end.
xla::ffi::Future start(const Call& call, const Resolved& resolved, Operation operation);

// Fails this call, and the same run on every other rank of the buffer.
xla::ffi::Future refuse(const Call& call, const Resolved& resolved, const std::string& error);

}  // namespace jax_ep
