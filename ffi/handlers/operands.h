// Operands, results and attributes of each target, the same on every platform: how XLA hands them
// over, and what they must look like. Sizes: docstrings of jax_ep/_primitives.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "handlers/call.h"
#include "handlers/shapes.h"
#include "layout/regions.h"
#include "protocol/numeric.h"
#include "protocol/quantize.h"
#include "protocol/signals.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// What a buffer was made for.
struct BufferShape {
  const WindowShape& window;
  int64_t hidden;
  int itemsize;
  int max_tokens_per_rank;
};
template <class Options>
BufferShape shape_of(const WindowShape& window, const Options& options) {
  return {window, options.hidden, options.itemsize, options.max_tokens_per_rank};
}

// How the rows of a dispatch travel, and what comes back of them.
struct Float8Operands {
  int64_t scale_format = 0;  // a ScaleFormat, not checked
  // [rows of tokens, num_scales(hidden)]; none: tokens are rows of x's type.
  std::optional<xla::ffi::AnyBuffer> scales;
  // [T, packed_row_bytes(hidden)] in high throughput: room for rows on their way, for platforms
  // that need it; nobody reads it.
  std::optional<xla::ffi::AnyBuffer> packed;

  bool quantized() const { return scale_format != 0; }
  ScaleFormat format() const { return static_cast<ScaleFormat>(scale_format); }
  float* scales_data() const {
    return scales ? static_cast<float*>(scales->untyped_data()) : nullptr;
  }
  xla::ffi::DataType token_type(xla::ffi::DataType row_type) const {
    return scales ? xla::ffi::DataType::F8E4M3FN : row_type;
  }
  // What a tag's variant adds: rows are the same on their way whatever the receiver makes of them.
  uint32_t variant() const { return static_cast<uint32_t>(scale_format) << 12; }
  void check(ShapeCheck& check, int64_t num_rows, int64_t hidden) const;
};

// What all operations ask of their rank and of the rows that they send.
void expect_rows(ShapeCheck& check, const BufferShape& shape, const xla::ffi::AnyBuffer& rank,
                 const xla::ffi::AnyBuffer& rows, int64_t num_tokens);

struct DispatchOperands {
  xla::ffi::AnyBuffer rank, x, topk_idx, topk_weights;
  xla::ffi::AnyBuffer tokens, weights, group_sizes, valid_sizes, num_dropped, clean_topk_idx,
      recv_rows, row_map;
  int64_t expert_alignment;
  bool zero_tail;
  bool expanded;
  Float8Operands float8 = {};

  int num_tokens() const;
  int64_t capacity() const;
  RowType row_type() const;
  OpTag tag(const Site& site) const;
  // The first thing that does not fit, empty if all does.
  std::string error(const BufferShape& shape) const;
};

struct CombineOperands {
  xla::ffi::AnyBuffer rank, y, row_weights, row_scalars, topk_idx, recv_rows;
  xla::ffi::AnyBuffer out, scalars;
  bool weighted;
  bool with_scalars;
  bool expanded;  // y has expert-major rows; otherwise one row for each slot, and scalars travel

  int num_tokens() const;
  int64_t capacity() const;
  RowType row_type() const;
  OpTag tag(const Site& site) const;
  std::string error(const BufferShape& shape) const;
};

struct CombineGradOperands {
  xla::ffi::AnyBuffer rank, g, topk_idx, recv_rows, row_weights, y;
  xla::ffi::AnyBuffer d_y, d_row_weights;
  int64_t expert_alignment;
  bool zero_tail;

  int num_tokens() const;
  int64_t capacity() const;
  RowType row_type() const;
  OpTag tag(const Site& site) const;
  std::string error(const BufferShape& shape) const;
};

template <class T>
T* data(const xla::ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// One call of a handler on one device. Context: what the platform adds, a run id or a stream.
template <class Context>
struct HandlerCall {
  Site* site;
  Context context;
  int32_t device_ordinal;
  BufferRef buffer;
};

// The handlers proper take a call and the operands; these turn XLA's flat arguments into
// them. Their order is that of the bindings below.
template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const DispatchOperands&)>
Result decode_dispatch(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                       int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                       int64_t expanded, xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer x,
                       xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer topk_weights,
                       xla::ffi::Result<xla::ffi::AnyBuffer> tokens,
                       xla::ffi::Result<xla::ffi::AnyBuffer> weights,
                       xla::ffi::Result<xla::ffi::AnyBuffer> group_sizes,
                       xla::ffi::Result<xla::ffi::AnyBuffer> valid_sizes,
                       xla::ffi::Result<xla::ffi::AnyBuffer> num_dropped,
                       xla::ffi::Result<xla::ffi::AnyBuffer> clean_topk_idx,
                       xla::ffi::Result<xla::ffi::AnyBuffer> recv_rows,
                       xla::ffi::Result<xla::ffi::AnyBuffer> row_map) {
  return run(
      {site, context, ordinal, {buffer_id, fingerprint}},
      {rank, x, topk_idx, topk_weights, *tokens, *weights, *group_sizes, *valid_sizes, *num_dropped,
       *clean_topk_idx, *recv_rows, *row_map, expert_alignment, zero_tail != 0, expanded != 0});
}

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const DispatchOperands&)>
Result decode_float8_dispatch(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                              int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                              int64_t expanded, int64_t scale_format, int64_t dequantize,
                              xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer x,
                              xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer topk_weights,
                              xla::ffi::Result<xla::ffi::AnyBuffer> tokens,
                              xla::ffi::Result<xla::ffi::AnyBuffer> scales,
                              xla::ffi::Result<xla::ffi::AnyBuffer> weights,
                              xla::ffi::Result<xla::ffi::AnyBuffer> group_sizes,
                              xla::ffi::Result<xla::ffi::AnyBuffer> valid_sizes,
                              xla::ffi::Result<xla::ffi::AnyBuffer> num_dropped,
                              xla::ffi::Result<xla::ffi::AnyBuffer> clean_topk_idx,
                              xla::ffi::Result<xla::ffi::AnyBuffer> recv_rows,
                              xla::ffi::Result<xla::ffi::AnyBuffer> row_map,
                              xla::ffi::Result<xla::ffi::AnyBuffer> packed) {
  Float8Operands float8{scale_format, std::nullopt, *packed};
  if (dequantize == 0) float8.scales = *scales;
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {rank, x, topk_idx, topk_weights, *tokens, *weights, *group_sizes, *valid_sizes,
              *num_dropped, *clean_topk_idx, *recv_rows, *row_map, expert_alignment, zero_tail != 0,
              expanded != 0, float8});
}

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const CombineOperands&)>
Result decode_combine(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                      int64_t fingerprint, int64_t weighted, int64_t with_scalars, int64_t expanded,
                      xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer y,
                      xla::ffi::AnyBuffer row_weights, xla::ffi::AnyBuffer row_scalars,
                      xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer recv_rows,
                      xla::ffi::Result<xla::ffi::AnyBuffer> out,
                      xla::ffi::Result<xla::ffi::AnyBuffer> scalars) {
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {rank, y, row_weights, row_scalars, topk_idx, recv_rows, *out, *scalars, weighted != 0,
              with_scalars != 0, expanded != 0});
}

template <class Context, class Result,
          Result (*run)(const HandlerCall<Context>&, const CombineGradOperands&)>
Result decode_combine_grad(Site* site, Context context, int32_t ordinal, int64_t buffer_id,
                           int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                           xla::ffi::AnyBuffer rank, xla::ffi::AnyBuffer g,
                           xla::ffi::AnyBuffer topk_idx, xla::ffi::AnyBuffer recv_rows,
                           xla::ffi::AnyBuffer row_weights, xla::ffi::AnyBuffer y,
                           xla::ffi::Result<xla::ffi::AnyBuffer> d_y,
                           xla::ffi::Result<xla::ffi::AnyBuffer> d_row_weights) {
  return run({site, context, ordinal, {buffer_id, fingerprint}},
             {rank, g, topk_idx, recv_rows, row_weights, y, *d_y, *d_row_weights, expert_alignment,
              zero_tail != 0});
}

// Binds the platform's context (a type that Ffi::Bind().Ctx takes) between the site and the device.
template <class ContextBinding>
auto bind_call() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::State<Site>>()
      .template Ctx<ContextBinding>()
      .template Ctx<xla::ffi::DeviceOrdinal>()
      .template Attr<int64_t>("buffer_id")
      .template Attr<int64_t>("fingerprint");
}

// Bindings can be neither copied nor moved: each step makes the next one in place.
template <int num_operands, int num_results, class Binding>
auto bind_buffers(Binding&& binding) {
  if constexpr (num_operands > 0) {
    return bind_buffers<num_operands - 1, num_results>(
        std::move(binding).template Arg<xla::ffi::AnyBuffer>());
  } else if constexpr (num_results > 1) {
    return bind_buffers<0, num_results - 1>(std::move(binding).template Ret<xla::ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<xla::ffi::AnyBuffer>();
  }
}

template <class ContextBinding>
auto bind_dispatch() {
  return bind_buffers<4, 8>(bind_call<ContextBinding>()
                                .template Attr<int64_t>("expert_alignment")
                                .template Attr<int64_t>("zero_tail")
                                .template Attr<int64_t>("expanded"));
}
template <class ContextBinding>
auto bind_float8_dispatch() {
  return bind_buffers<4, 10>(bind_call<ContextBinding>()
                                 .template Attr<int64_t>("expert_alignment")
                                 .template Attr<int64_t>("zero_tail")
                                 .template Attr<int64_t>("expanded")
                                 .template Attr<int64_t>("scale_format")
                                 .template Attr<int64_t>("dequantize"));
}

template <class ContextBinding>
auto bind_combine() {
  return bind_buffers<6, 2>(bind_call<ContextBinding>()
                                .template Attr<int64_t>("weighted")
                                .template Attr<int64_t>("with_scalars")
                                .template Attr<int64_t>("expanded"));
}
template <class ContextBinding>
auto bind_combine_grad() {
  return bind_buffers<6, 2>(bind_call<ContextBinding>()
                                .template Attr<int64_t>("expert_alignment")
                                .template Attr<int64_t>("zero_tail"));
}

}  // namespace jax_ep
