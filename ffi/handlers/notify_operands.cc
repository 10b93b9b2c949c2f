#include "handlers/notify_operands.h"

#include "handlers/shapes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;
using ffi::DataType;

constexpr uint32_t kGivenRoute = 0x800;  // in a dispatch tag's variant

void expect_routing(ShapeCheck& check, const BufferShape& shape, int64_t num_tokens,
                    const AnyBuffer& topk_idx, const AnyBuffer& row_index,
                    const AnyBuffer& counts) {
  const int64_t topk = shape.window.num_experts_per_tok;
  check.expect("sanitised topk_idx", topk_idx, DataType::S32, {num_tokens, topk});
  check.expect("row_index", row_index, DataType::S32, {num_tokens, topk});
  check.expect("counts", counts, DataType::S32, {shape.window.num_ranks, shape.window.num_experts});
}

}  // namespace

int NotifyOperands::num_tokens() const {
  const auto dims = topk_idx.dimensions();
  return dims.size() > 0 ? static_cast<int>(dims[0]) : 0;
}

OpTag NotifyOperands::tag(const Site& site) const {
  return {OpKind::kNotify, static_cast<uint32_t>(num_tokens()), 0, site.number};
}

std::string NotifyOperands::error(const BufferShape& shape) const {
  const int64_t topk = shape.window.num_experts_per_tok;
  ShapeCheck check("notify");
  check.expect("rank", rank, DataType::S32, {});
  check.expect_true("at most max_tokens_per_rank tokens",
                    num_tokens() <= shape.max_tokens_per_rank);
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("ticket", ticket, DataType::U32, {});
  expect_routing(check, shape, num_tokens(), clean_topk_idx, row_index, counts);
  return check.error();
}

OpTag RoutedDispatchOperands::tag(const Site& site) const {
  OpTag tag = base.tag(site);
  tag.variant |= kGivenRoute;
  return tag;
}

std::string RoutedDispatchOperands::error(const BufferShape& shape) const {
  const std::string error = base.error(shape);
  if (!error.empty()) return error;
  ShapeCheck check("dispatch");
  expect_routing(check, shape, num_tokens(), base.topk_idx, row_index, counts);
  return check.error();
}

}  // namespace jax_ep
