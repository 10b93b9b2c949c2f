// Operands, results and attributes of notify and of dispatch along a given routing, the same on
// every platform. Sizes: docstrings of jax_ep/_primitives.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "handlers/operands.h"

namespace jax_ep {

struct NotifyOperands {
  xla::ffi::AnyBuffer rank, topk_idx, ticket;
  xla::ffi::AnyBuffer clean_topk_idx, row_index, counts;

  int num_tokens() const;
  OpTag tag(const Site& site) const;
  // The first thing that does not fit, empty if all does.
  std::string error(const BufferShape& shape) const;
};

// `base` without clean_topk_idx, which nothing writes.
struct RoutedDispatchOperands {
  DispatchOperands base;
  xla::ffi::AnyBuffer row_index, counts;

  int num_tokens() const { return base.num_tokens(); }
  OpTag tag(const Site& site) const;
  std::string error(const BufferShape& shape) const;
};

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const NotifyOperands&)>
Result decode_notify(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                     int64_t fingerprint, xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer topk_idx,
                     xla::ffi::AnyBuffer ticket,
                     xla::ffi::Result<xla::ffi::AnyBuffer> clean_topk_idx,
                     xla::ffi::Result<xla::ffi::AnyBuffer> row_index,
                     xla::ffi::Result<xla::ffi::AnyBuffer> counts) {
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {rank, topk_idx, ticket, *clean_topk_idx, *row_index, *counts});
}

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const RoutedDispatchOperands&)>
Result decode_routed_dispatch(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                              int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                              int64_t expanded, xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer x,
                              xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer row_index,
                              xla::ffi::AnyBuffer counts, xla::ffi::AnyBuffer topk_weights,
                              xla::ffi::Result<xla::ffi::AnyBuffer> tokens,
                              xla::ffi::Result<xla::ffi::AnyBuffer> weights,
                              xla::ffi::Result<xla::ffi::AnyBuffer> group_sizes,
                              xla::ffi::Result<xla::ffi::AnyBuffer> valid_sizes,
                              xla::ffi::Result<xla::ffi::AnyBuffer> num_dropped,
                              xla::ffi::Result<xla::ffi::AnyBuffer> recv_rows,
                              xla::ffi::Result<xla::ffi::AnyBuffer> row_map) {
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {{rank, x, topk_idx, topk_weights, *tokens, *weights, *group_sizes, *valid_sizes,
               *num_dropped, /*clean_topk_idx=*/topk_idx, *recv_rows, *row_map, expert_alignment,
               zero_tail != 0, expanded != 0},
              row_index,
              counts});
}

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const RoutedDispatchOperands&)>
Result decode_routed_float8_dispatch(
    Site* site, Context context, int32_t ordinal, int64_t buffer_id, int64_t fingerprint,
    int64_t expert_alignment, int64_t zero_tail, int64_t expanded, int64_t scale_format,
    int64_t dequantize, xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer x,
    xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer row_index, xla::ffi::AnyBuffer counts,
    xla::ffi::AnyBuffer topk_weights, xla::ffi::Result<xla::ffi::AnyBuffer> tokens,
    xla::ffi::Result<xla::ffi::AnyBuffer> scales, xla::ffi::Result<xla::ffi::AnyBuffer> weights,
    xla::ffi::Result<xla::ffi::AnyBuffer> group_sizes,
    xla::ffi::Result<xla::ffi::AnyBuffer> valid_sizes,
    xla::ffi::Result<xla::ffi::AnyBuffer> num_dropped,
    xla::ffi::Result<xla::ffi::AnyBuffer> recv_rows, xla::ffi::Result<xla::ffi::AnyBuffer> row_map,
    xla::ffi::Result<xla::ffi::AnyBuffer> packed) {
  Float8Operands float8{scale_format, std::nullopt, *packed};
  if (dequantize == 0) float8.scales = *scales;
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {{rank, x, topk_idx, topk_weights, *tokens, *weights, *group_sizes, *valid_sizes,
               *num_dropped, /*clean_topk_idx=*/topk_idx, *recv_rows, *row_map, expert_alignment,
               zero_tail != 0, expanded != 0, float8},
              row_index,
              counts});
}

template <class ContextBinding>
auto bind_notify() {
  return bind_buffers<3, 3>(bind_call<ContextBinding>());
}
template <class ContextBinding>
auto bind_routed_dispatch() {
  return bind_buffers<6, 7>(bind_call<ContextBinding>()
                                .template Attr<int64_t>("expert_alignment")
                                .template Attr<int64_t>("zero_tail")
                                .template Attr<int64_t>("expanded"));
}

template <class ContextBinding>
auto bind_routed_float8_dispatch() {
  return bind_buffers<6, 9>(bind_call<ContextBinding>()
                                .template Attr<int64_t>("expert_alignment")
                                .template Attr<int64_t>("zero_tail")
                                .template Attr<int64_t>("expanded")
                                .template Attr<int64_t>("scale_format")
                                .template Attr<int64_t>("dequantize"));
}

}  // namespace jax_ep
