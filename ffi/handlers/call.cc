#include "handlers/call.h"

#include <atomic>
#include <utility>

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId Site::id = {};
ffi::TypeInfo Site::info = ffi::MakeTypeInfo<Site>();

namespace {

std::string name_of(const BufferRef& ref) { return "buffer " + std::to_string(ref.id); }

}  // namespace

ffi::ErrorOr<std::unique_ptr<Site>> instantiate_site(ffi::Dictionary) {
  static std::atomic<uint64_t> next{1};
  auto site = std::make_unique<Site>();
  site->number = next.fetch_add(1, std::memory_order_relaxed);
  return ffi::ErrorOr<std::unique_ptr<Site>>(std::move(site));
}

ffi::Error to_error(const std::string& text) {
  const bool timeout = text.rfind("EpTimeoutError", 0) == 0;
  const bool usage = text.rfind("EpUsageError", 0) == 0;
  return ffi::Error(timeout ? ffi::ErrorCode::kDeadlineExceeded
                    : usage ? ffi::ErrorCode::kInvalidArgument
                            : ffi::ErrorCode::kFailedPrecondition,
                    text);
}

std::string wrong_arity_text() {
  return "EpUsageError: the call has not its target's number of arrays. Call the op through "
         "jax_ep.";
}

std::string closed_text(const BufferRef& ref) {
  return "EpUsageError: " + name_of(ref) +
         " is closed (or was never made in this process). Make a new Buffer and trace the function "
         "again with it.";
}

std::string stale_text(const BufferRef& ref) {
  return "EpUsageError: " + name_of(ref) +
         " is not the one this program was compiled for (its config or mesh differs, as with a "
         "persistent compilation cache). Trace the function again.";
}

std::string foreign_device_text(const BufferRef& ref, int device_ordinal) {
  return "EpUsageError: device " + std::to_string(device_ordinal) +
         " runs this function but is not in the mesh of " + name_of(ref) +
         ". Use the mesh that the Buffer was made with.";
}

}  // namespace jax_ep
