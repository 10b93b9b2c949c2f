#include "handlers/shapes.h"

#include <algorithm>
#include <sstream>

namespace jax_ep {

namespace ffi = xla::ffi;

void ShapeCheck::expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                        std::initializer_list<int64_t> shape) {
  if (!error_.empty()) return;
  const auto dims = buffer.dimensions();
  const bool same = buffer.element_type() == type &&
                    std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
  if (same) return;
  std::ostringstream text;
  auto print = [&text](const auto& sizes) {
    text << "[";
    for (int64_t size : sizes) text << " " << size;
    text << " ]";
  };
  text << "EpUsageError: " << op_ << ": " << name << " has element type " << buffer.element_type()
       << " and shape ";
  print(dims);
  text << ", expected element type " << type << " and shape ";
  print(shape);
  text << ". Call the op through jax_ep.";
  error_ = text.str();
}

void ShapeCheck::expect_true(const char* what, bool holds) {
  if (!error_.empty() || holds) return;
  error_ =
      std::string("EpUsageError: ") + op_ + ": expected " + what + ". Call the op through jax_ep.";
}

int64_t dim(const xla::ffi::AnyBuffer& buffer, size_t axis) {
  const auto dims = buffer.dimensions();
  return axis < dims.size() ? dims[axis] : 0;
}

std::optional<RowType> row_type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return RowType::kFloat32;
    case ffi::DataType::BF16:
      return RowType::kBFloat16;
    case ffi::DataType::F16:
      return RowType::kFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace jax_ep
