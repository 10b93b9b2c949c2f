#include "handlers/cpu_call.h"

#include <utility>

namespace jax_ep {

namespace ffi = xla::ffi;

CpuResolved resolve(const CpuCall& call, int32_t axis_index) {
  CpuResolved resolved = resolve(find_cpu_buffer(call.buffer.id), call.buffer, call.device_ordinal);
  if (!resolved.error.empty() || resolved.place.rank == axis_index) return resolved;
  resolved.error = "EpUsageError: device " + std::to_string(call.device_ordinal) + " is rank " +
                   std::to_string(resolved.place.rank) + " of buffer " +
                   std::to_string(call.buffer.id) + " but rank " + std::to_string(axis_index) +
                   " in the mesh of this function, which orders the devices otherwise. Use the "
                   "mesh that the Buffer was made with.";
  return resolved;
}

ffi::Future start(const CpuCall& call, const CpuResolved& resolved, Operation operation) {
  ffi::Promise promise;
  ffi::Future future(promise);
  // The closure keeps the buffer alive until its last operation has ended.
  operation.done = [promise = std::move(promise),
                    buffer = resolved.buffer](const std::string* error) mutable {
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(to_error(*error));
    }
  };
  Group& group = *resolved.buffer->groups()[resolved.place.group];
  group.present(resolved.place.rank, {call.context.run_id, call.site->number},
                std::move(operation));
  return future;
}

ffi::Future refuse(const CpuCall& call, const CpuResolved& resolved) {
  ffi::Promise promise;
  ffi::Future future(promise);
  if (resolved.buffer != nullptr) resolved.buffer->reject(call.context.run_id, resolved.error);
  promise.SetError(to_error(resolved.error));
  return future;
}

}  // namespace jax_ep
