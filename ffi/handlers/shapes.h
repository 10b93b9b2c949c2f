// Checks of buffers against what an op expects. Python has checked before: these guard the memory
// that native code touches against any other caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "protocol/numeric.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

class ShapeCheck {
 public:
  explicit ShapeCheck(const char* op) : op_(op) {}

  void expect(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType type,
              std::initializer_list<int64_t> shape);
  void expect_true(const char* what, bool holds);
  // First disagreement, empty if there is none.
  const std::string& error() const { return error_; }

 private:
  const char* op_;
  std::string error_;
};

// Zero where the array has fewer axes: a check of its shape will say so.
int64_t dim(const xla::ffi::AnyBuffer& buffer, size_t axis);

std::optional<RowType> row_type_of(xla::ffi::DataType type);

}  // namespace jax_ep
