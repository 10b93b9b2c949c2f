// What the handlers of all platforms say and remember about a call: its site, its buffer's name in
// the program, and the texts of errors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

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

// The error code follows the class that the text begins with.
xla::ffi::Error to_error(const std::string& text);

// Where a buffer has a device.
struct Place {
  int group;
  int rank;
};

// The buffer and the place of this device in it, or the reason why the call cannot be served. A
// buffer that is not the program's own is left out.
template <class Buffer>
struct Resolved {
  std::shared_ptr<Buffer> buffer;
  Place place{};
  std::string error;  // empty: fine
};

std::string wrong_arity_text();
std::string closed_text(const BufferRef& ref);
std::string stale_text(const BufferRef& ref);
std::string foreign_device_text(const BufferRef& ref, int device_ordinal);

// `found`: what the registry has under the id, if anything.
template <class Buffer>
Resolved<Buffer> resolve(std::shared_ptr<Buffer> found, const BufferRef& ref, int device_ordinal) {
  if (found == nullptr) return {nullptr, {}, closed_text(ref)};
  if (found->options().fingerprint != ref.fingerprint) return {nullptr, {}, stale_text(ref)};
  const auto place = found->find_device(device_ordinal);
  if (!place) return {std::move(found), {}, foreign_device_text(ref, device_ordinal)};
  return {std::move(found), {place->group, place->rank}, ""};
}

}  // namespace jax_ep
