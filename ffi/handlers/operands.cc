#include "handlers/operands.h"

#include "handlers/shapes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;
using ffi::DataType;

constexpr uint32_t kNotExpanded = 0x400;  // in a tag's variant

OpTag make_tag(OpKind op, int num_tokens, uint32_t variant, const Site& site) {
  return {op, static_cast<uint32_t>(num_tokens), variant, site.number};
}

}  // namespace

void expect_rows(ShapeCheck& check, const BufferShape& shape, const AnyBuffer& rank,
                 const AnyBuffer& rows, int64_t num_tokens) {
  const auto row_type = row_type_of(rows.element_type());
  check.expect("rank", rank, DataType::S32, {});
  check.expect_true("rows of float32, bfloat16 or float16", row_type.has_value());
  check.expect_true("the buffer's hidden size", dim(rows, 1) == shape.hidden);
  check.expect_true("the buffer's row type",
                    row_type && row_type_bytes(*row_type) == shape.itemsize);
  check.expect_true("at most max_tokens_per_rank tokens", num_tokens <= shape.max_tokens_per_rank);
}

void Float8Operands::check(ShapeCheck& check, int64_t num_rows, int64_t hidden) const {
  const bool known =
      scale_format >= 0 && scale_format <= static_cast<int64_t>(ScaleFormat::kPowerOfTwo);
  check.expect_true("a known scale_format", known);
  check.expect_true("a scale_format where there are scales", quantized() || !scales);
  if (scales) check.expect("scales", *scales, DataType::F32, {num_rows, num_scales(hidden)});
}

int DispatchOperands::num_tokens() const { return static_cast<int>(dim(x, 0)); }
int64_t DispatchOperands::capacity() const { return dim(weights, 0); }
RowType DispatchOperands::row_type() const { return *row_type_of(x.element_type()); }

OpTag DispatchOperands::tag(const Site& site) const {
  const uint32_t variant =
      static_cast<uint32_t>(x.element_type()) | (expanded ? 0u : kNotExpanded) | float8.variant();
  return make_tag(OpKind::kDispatch, num_tokens(), variant, site);
}

std::string DispatchOperands::error(const BufferShape& shape) const {
  const DataType type = x.element_type();
  const int64_t topk = shape.window.num_experts_per_tok;
  const int64_t num_local = shape.window.experts_per_rank();
  const int64_t num_slots = int64_t{shape.window.num_ranks} * num_tokens();
  const int64_t num_rows = expanded ? capacity() : num_slots;
  ShapeCheck check("dispatch");
  expect_rows(check, shape, rank, x, num_tokens());
  check.expect("x", x, type, {num_tokens(), shape.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("topk_weights", topk_weights, DataType::F32, {num_tokens(), topk});
  check.expect("tokens", tokens, float8.token_type(type), {num_rows, shape.hidden});
  float8.check(check, num_rows, shape.hidden);
  if (float8.packed) {
    check.expect("packed", *float8.packed, DataType::U8,
                 {num_tokens(), packed_row_bytes(shape.hidden)});
  }
  check.expect("weights", weights, DataType::F32, {capacity()});
  check.expect("group_sizes", group_sizes, DataType::S32, {num_local});
  check.expect("valid_sizes", valid_sizes, DataType::S32, {num_local});
  check.expect("num_dropped", num_dropped, DataType::S32, {});
  check.expect("clean topk_idx", clean_topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("recv_rows", recv_rows, DataType::S32, {num_slots, topk});
  check.expect("row_map", row_map, DataType::S32, {expanded ? 0 : capacity()});
  check.expect_true("a positive expert_alignment", expert_alignment > 0);
  return check.error();
}

int CombineOperands::num_tokens() const { return static_cast<int>(dim(topk_idx, 0)); }
int64_t CombineOperands::capacity() const { return dim(expanded ? y : row_scalars, 0); }
RowType CombineOperands::row_type() const { return *row_type_of(y.element_type()); }

OpTag CombineOperands::tag(const Site& site) const {
  const uint32_t variant = static_cast<uint32_t>(y.element_type()) | (weighted ? 0x100u : 0u) |
                           (with_scalars ? 0x200u : 0u) | (expanded ? 0u : kNotExpanded);
  return make_tag(OpKind::kCombine, num_tokens(), variant, site);
}

std::string CombineOperands::error(const BufferShape& shape) const {
  const DataType type = y.element_type();
  const int64_t topk = shape.window.num_experts_per_tok;
  const int64_t num_slots = int64_t{shape.window.num_ranks} * num_tokens();
  ShapeCheck check("combine");
  expect_rows(check, shape, rank, y, num_tokens());
  check.expect_true("scalars and no weights for a y of slots",
                    expanded || (with_scalars && !weighted));
  check.expect("y", y, type, {expanded ? capacity() : num_slots, shape.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("recv_rows", recv_rows, DataType::S32, {num_slots, topk});
  check.expect("row_weights", row_weights, DataType::F32, {weighted ? capacity() : 0});
  check.expect("row_scalars", row_scalars, DataType::F32, {with_scalars ? capacity() : 0});
  check.expect("out", out, type, {num_tokens(), shape.hidden});
  if (with_scalars) check.expect("scalars", scalars, DataType::F32, {num_tokens(), topk});
  return check.error();
}

int CombineGradOperands::num_tokens() const { return static_cast<int>(dim(g, 0)); }
int64_t CombineGradOperands::capacity() const { return dim(y, 0); }
RowType CombineGradOperands::row_type() const { return *row_type_of(g.element_type()); }

OpTag CombineGradOperands::tag(const Site& site) const {
  return make_tag(OpKind::kCombineGrad, num_tokens(), static_cast<uint32_t>(g.element_type()),
                  site);
}

std::string CombineGradOperands::error(const BufferShape& shape) const {
  const DataType type = g.element_type();
  const int64_t topk = shape.window.num_experts_per_tok;
  ShapeCheck check("combine_grad");
  expect_rows(check, shape, rank, g, num_tokens());
  check.expect("g", g, type, {num_tokens(), shape.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("recv_rows", recv_rows, DataType::S32,
               {int64_t{shape.window.num_ranks} * num_tokens(), topk});
  check.expect("row_weights", row_weights, DataType::F32, {capacity()});
  check.expect("y", y, type, {capacity(), shape.hidden});
  check.expect("d_y", d_y, type, {capacity(), shape.hidden});
  check.expect("d_row_weights", d_row_weights, DataType::F32, {capacity()});
  check.expect_true("a positive expert_alignment", expert_alignment > 0);
  return check.error();
}

}  // namespace jax_ep
