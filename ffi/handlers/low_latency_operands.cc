#include "handlers/low_latency_operands.h"

#include "handlers/shapes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;
using ffi::DataType;

constexpr uint32_t kWeighted = 0x100u;
constexpr uint32_t kWithScalars = 0x200u;
constexpr uint32_t kSplit = 0x400u;

uint32_t variant_of(const AnyBuffer& rows, Half half) {
  return static_cast<uint32_t>(rows.element_type()) | (half == Half::kWhole ? 0u : kSplit);
}

// Slots are those of one epoch, whatever the buffer says of its tokens.
void expect_one_epoch(ShapeCheck& check, const BufferShape& shape, int64_t num_tokens) {
  check.expect_true("at most the tokens that one epoch carries",
                    num_tokens <= shape.window.tokens_per_epoch);
}

void expect_token(ShapeCheck& check, const OrderToken& token) {
  check.expect("token", token.in, DataType::F32, {});
  check.expect("token out", token.out, DataType::F32, {});
}

void expect_stats(ShapeCheck& check, const LowLatencyStats& stats, const WindowShape& window,
                  bool with_stats) {
  const int64_t num_experts = with_stats ? window.experts_per_rank() : 0;
  const int64_t num_peers = with_stats ? window.num_ranks : 0;
  check.expect("tokens_per_expert", stats.tokens_per_expert, DataType::S32, {num_experts});
  check.expect("waited_ns", stats.waited_ns, DataType::U32, {num_peers});
  check.expect("tokens_per_expert out", stats.tokens_per_expert_out, DataType::S32, {num_experts});
  check.expect("waited_ns out", stats.waited_ns_out, DataType::U32, {num_peers});
}

}  // namespace

std::optional<LowLatencyDispatchOperands> LowLatencyDispatchOperands::read(FlatCall call,
                                                                           Half half) {
  const bool start = half == Half::kStart;
  const bool done = half == Half::kDone;
  Float8Operands float8{call.attribute("scale_format"), std::nullopt, std::nullopt};
  const bool with_scales = !start && float8.quantized() && call.attribute("dequantize") == 0;
  const size_t num_rets = (start ? 3 : done ? 8 : 9) + (with_scales ? 1 : 0);
  if (!call.has(start ? 5 : done ? 8 : 7, num_rets)) return std::nullopt;
  const AnyBuffer rank = call.arg();
  const AnyBuffer x = call.arg();
  const AnyBuffer topk_idx = call.arg();
  const AnyBuffer topk_weights = call.arg();
  std::optional<AnyBuffer> ticket;
  std::optional<AnyBuffer> clean_topk_idx;
  std::optional<LowLatencyReceived> received;
  std::optional<LowLatencyStats> stats;
  if (done) ticket = call.arg();
  if (!start) {
    const AnyBuffer tokens = call.ret();
    if (with_scales) float8.scales = call.ret();
    received = {tokens, call.ret(), call.ret(), call.ret(), call.ret()};
  }
  if (!done) clean_topk_idx = call.ret();
  if (start) ticket = call.ret();
  if (!start) stats = {call.arg(), call.arg(), call.ret(), call.ret()};
  const OrderToken token{call.arg(), call.ret()};
  const bool padded = call.attribute("padded") != 0;
  return {{half, rank, x, topk_idx, topk_weights, ticket, clean_topk_idx, received, stats, token,
           padded, float8}};
}

int LowLatencyDispatchOperands::num_tokens() const { return static_cast<int>(dim(x, 0)); }
int64_t LowLatencyDispatchOperands::num_rows() const {
  return received ? dim(received->tokens, 0) : 0;
}

OpTag LowLatencyDispatchOperands::tag(const Site& site) const {
  const auto tokens = static_cast<uint32_t>(num_tokens());
  return {OpKind::kDispatch, tokens, variant_of(x, half) | float8.variant(), site.number};
}

std::string LowLatencyDispatchOperands::error(const BufferShape& shape) const {
  const DataType type = x.element_type();
  const int64_t topk = shape.window.num_experts_per_tok;
  const int64_t num_local = shape.window.experts_per_rank();
  const int64_t num_slots = int64_t{shape.window.num_ranks} * num_tokens();
  ShapeCheck check("low_latency_dispatch");
  expect_rows(check, shape, rank, x, num_tokens());
  expect_one_epoch(check, shape, num_tokens());
  check.expect("x", x, type, {num_tokens(), shape.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("topk_weights", topk_weights, DataType::F32, {num_tokens(), topk});
  if (ticket) check.expect("ticket", *ticket, DataType::U32, {2});
  if (clean_topk_idx) {
    check.expect("clean topk_idx", *clean_topk_idx, DataType::S32, {num_tokens(), topk});
  }
  if (received) {
    check.expect("tokens", received->tokens, float8.token_type(type), {num_rows(), shape.hidden});
    check.expect("weights", received->weights, DataType::F32, {num_rows()});
    check.expect("counts", received->counts, DataType::S32, {num_local});
    check.expect("num_dropped", received->num_dropped, DataType::S32, {});
    check.expect("recv_rows", received->recv_rows, DataType::S32, {num_slots, topk});
    check.expect_true("a block of R * T rows for every expert",
                      !padded || num_rows() == num_local * num_slots);
  }
  float8.check(check, num_rows(), shape.hidden);
  if (stats) expect_stats(check, *stats, shape.window, with_stats());
  expect_token(check, token);
  return check.error();
}

std::optional<LowLatencyCombineOperands> LowLatencyCombineOperands::read(FlatCall call, Half half) {
  const bool whole = half == Half::kWhole;
  const bool start = half == Half::kStart;
  if (!call.has(start ? 6 : 7, whole ? 3 : 2)) return std::nullopt;
  const AnyBuffer rank = call.arg();
  const AnyBuffer y = call.arg();
  const AnyBuffer row_weights = call.arg();
  std::optional<AnyBuffer> row_scalars;
  if (whole) row_scalars = call.arg();
  const AnyBuffer topk_idx = call.arg();
  const AnyBuffer recv_rows = call.arg();
  std::optional<AnyBuffer> ticket;
  std::optional<AnyBuffer> out;
  std::optional<AnyBuffer> scalars;
  if (start) ticket = call.ret();
  if (half == Half::kDone) ticket = call.arg();
  if (!start) out = call.ret();
  if (whole) scalars = call.ret();
  const OrderToken token{call.arg(), call.ret()};
  const bool weighted = !whole || call.attribute("weighted") != 0;
  const bool with_scalars = whole && call.attribute("with_scalars") != 0;
  return {{half, rank, y, row_weights, row_scalars, topk_idx, recv_rows, ticket, out, scalars,
           token, weighted, with_scalars}};
}

int LowLatencyCombineOperands::num_tokens() const { return static_cast<int>(dim(topk_idx, 0)); }
int64_t LowLatencyCombineOperands::num_rows() const { return dim(y, 0); }
RowType LowLatencyCombineOperands::row_type() const { return *row_type_of(y.element_type()); }

OpTag LowLatencyCombineOperands::tag(const Site& site) const {
  const auto tokens = static_cast<uint32_t>(num_tokens());
  const uint32_t flags = (weighted ? kWeighted : 0u) | (with_scalars ? kWithScalars : 0u);
  return {OpKind::kCombine, tokens, variant_of(y, half) | flags, site.number};
}

std::string LowLatencyCombineOperands::error(const BufferShape& shape) const {
  const DataType type = y.element_type();
  const int64_t topk = shape.window.num_experts_per_tok;
  ShapeCheck check("low_latency_combine");
  expect_rows(check, shape, rank, y, num_tokens());
  expect_one_epoch(check, shape, num_tokens());
  check.expect("y", y, type, {num_rows(), shape.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {num_tokens(), topk});
  check.expect("recv_rows", recv_rows, DataType::S32,
               {int64_t{shape.window.num_ranks} * num_tokens(), topk});
  check.expect("row_weights", row_weights, DataType::F32, {weighted ? num_rows() : 0});
  if (row_scalars) {
    check.expect("row_scalars", *row_scalars, DataType::F32, {with_scalars ? num_rows() : 0});
  }
  if (ticket) check.expect("ticket", *ticket, DataType::U32, {2});
  if (out) check.expect("out", *out, type, {num_tokens(), shape.hidden});
  if (with_scalars) check.expect("scalars", *scalars, DataType::F32, {num_tokens(), topk});
  expect_token(check, token);
  return check.error();
}

std::optional<LowLatencyCombineGradOperands> LowLatencyCombineGradOperands::read(FlatCall call,
                                                                                 Half) {
  if (!call.has(7, 3)) return std::nullopt;
  return {{{call.arg(), call.arg(), call.arg(), call.arg(), call.arg(), call.arg(), call.ret(),
            call.ret(), /*expert_alignment=*/1, /*zero_tail=*/true},
           {call.arg(), call.ret()}}};
}

std::string LowLatencyCombineGradOperands::error(const BufferShape& shape) const {
  ShapeCheck check("low_latency_combine_grad");
  expect_one_epoch(check, shape, num_tokens());
  expect_token(check, token);
  return check.error().empty() ? base.error(shape) : check.error();
}

}  // namespace jax_ep
