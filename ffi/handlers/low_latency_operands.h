// Operands, results and attributes of the low-latency targets, whole or split in two, the same on
// every platform. Sizes: docstrings of jax_ep/_low_latency_primitives.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "handlers/call.h"
#include "handlers/operands.h"
#include "protocol/split.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// A call's arrays and attributes as XLA hands them over, read one after another.
class FlatCall {
 public:
  FlatCall(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
           xla::ffi::Dictionary attributes)
      : args_(args), rets_(rets), attributes_(attributes) {}

  bool has(size_t num_args, size_t num_rets) const {
    return args_.size() == num_args && rets_.size() == num_rets;
  }
  xla::ffi::AnyBuffer arg() { return args_.get<xla::ffi::AnyBuffer>(next_arg_++).value(); }
  xla::ffi::AnyBuffer ret() { return *rets_.get<xla::ffi::AnyBuffer>(next_ret_++).value(); }
  // Zero where the program gives none.
  int64_t attribute(const char* name) const {
    const auto value = attributes_.get<int64_t>(name);
    return value.has_value() ? value.value() : 0;
  }

 private:
  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
  xla::ffi::Dictionary attributes_;
  size_t next_arg_ = 0;
  size_t next_ret_ = 0;
};

// An operation's place in the order that `after` asks for: data that nobody reads.
struct OrderToken {
  xla::ffi::AnyBuffer in, out;
};

// Statistics before and after the call; without elements where the program keeps none.
struct LowLatencyStats {
  xla::ffi::AnyBuffer tokens_per_expert, waited_ns;
  xla::ffi::AnyBuffer tokens_per_expert_out, waited_ns_out;
};

// What a dispatch receives: all that its start does not have. Scales come after the tokens.
struct LowLatencyReceived {
  xla::ffi::AnyBuffer tokens, weights, counts, num_dropped, recv_rows;
};

struct LowLatencyDispatchOperands {
  Half half;
  xla::ffi::AnyBuffer rank, x, topk_idx, topk_weights;
  std::optional<xla::ffi::AnyBuffer> ticket;          // result of a start, operand of a done
  std::optional<xla::ffi::AnyBuffer> clean_topk_idx;  // result of all but a done
  std::optional<LowLatencyReceived> received;
  std::optional<LowLatencyStats> stats;
  OrderToken token;
  bool padded;
  Float8Operands float8;

  // Null when the number of arrays is not the target's.
  static std::optional<LowLatencyDispatchOperands> read(FlatCall call, Half half);

  int num_tokens() const;
  int64_t num_rows() const;
  bool with_stats() const { return stats && stats->waited_ns.element_count() > 0; }
  OpTag tag(const Site& site) const;
  // The first thing that does not fit, empty if all does.
  std::string error(const BufferShape& shape) const;
};

struct LowLatencyCombineOperands {
  Half half;
  xla::ffi::AnyBuffer rank, y, row_weights;
  std::optional<xla::ffi::AnyBuffer> row_scalars;  // of a whole combine
  xla::ffi::AnyBuffer topk_idx, recv_rows;
  std::optional<xla::ffi::AnyBuffer> ticket;   // as above
  std::optional<xla::ffi::AnyBuffer> out;      // of all but a start
  std::optional<xla::ffi::AnyBuffer> scalars;  // of a whole combine
  OrderToken token;
  bool weighted;
  bool with_scalars;

  static std::optional<LowLatencyCombineOperands> read(FlatCall call, Half half);

  int num_tokens() const;
  int64_t num_rows() const;
  RowType row_type() const;
  OpTag tag(const Site& site) const;
  std::string error(const BufferShape& shape) const;
};

struct LowLatencyCombineGradOperands {
  CombineGradOperands base;
  OrderToken token;

  static std::optional<LowLatencyCombineGradOperands> read(FlatCall call, Half half);

  int num_tokens() const { return base.num_tokens(); }
  OpTag tag(const Site& site) const { return base.tag(site); }
  std::string error(const BufferShape& shape) const;
};

}  // namespace jax_ep
