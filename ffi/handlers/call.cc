#include "handlers/call.h"

#include <atomic>
#include <utility>

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId Site::id = {};
ffi::TypeInfo Site::info = ffi::MakeTypeInfo<Site>();

namespace {

ffi::Error to_error(const std::string& text) {
  const bool timeout = text.rfind("EpTimeoutError", 0) == 0;
  const bool usage = text.rfind("EpUsageError", 0) == 0;
  return ffi::Error(timeout ? ffi::ErrorCode::kDeadlineExceeded
                    : usage ? ffi::ErrorCode::kInvalidArgument
                            : ffi::ErrorCode::kFailedPrecondition,
                    text);
}

}  // namespace

ffi::ErrorOr<std::unique_ptr<Site>> instantiate_site(ffi::Dictionary) {
  static std::atomic<uint64_t> next{1};
  auto site = std::make_unique<Site>();
  site->number = next.fetch_add(1, std::memory_order_relaxed);
  return ffi::ErrorOr<std::unique_ptr<Site>>(std::move(site));
}

Resolved resolve(const Call& call) {
  Resolved resolved;
  resolved.buffer = find_cpu_buffer(call.buffer.id);
  const std::string name = "buffer " + std::to_string(call.buffer.id);
  if (resolved.buffer == nullptr) {
    resolved.error = "EpUsageError: " + name +
                     " is closed (or was never made in this process). Make a new Buffer and trace "
                     "the function again with it.";
    return resolved;
  }
  if (resolved.buffer->options().fingerprint != call.buffer.fingerprint) {
    resolved.buffer = nullptr;
    resolved.error =
        "EpUsageError: " + name +
        " is not the one this program was compiled for (its config or mesh differs, as "
        "with a persistent compilation cache). Trace the function again.";
    return resolved;
  }
  const auto place = resolved.buffer->find_device(call.device_ordinal);
  if (!place) {
    resolved.error = "EpUsageError: device " + std::to_string(call.device_ordinal) +
                     " runs this function but is not in the mesh of " + name +
                     ". Use the mesh that the Buffer was made with.";
    return resolved;
  }
  resolved.place = *place;
  if (place->rank != call.axis_index) {
    resolved.error = "EpUsageError: device " + std::to_string(call.device_ordinal) + " is rank " +
                     std::to_string(place->rank) + " of " + name + " but rank " +
                     std::to_string(call.axis_index) +
                     " in the mesh of this function, which orders the devices otherwise. Use the "
                     "mesh that the Buffer was made with.";
  }
  return resolved;
}

ffi::Future start(const Call& call, const Resolved& resolved, Operation operation) {
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
  operation.tag.site = call.site->number;
  Group& group = *resolved.buffer->groups()[resolved.place.group];
  group.present(resolved.place.rank, {call.run_id, call.site->number}, std::move(operation));
  return future;
}

ffi::Future refuse(const Call& call, const Resolved& resolved, const std::string& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  if (resolved.buffer != nullptr) resolved.buffer->reject(call.run_id, error);
  promise.SetError(to_error(error));
  return future;
}

}  // namespace jax_ep
