// What one thread moves of a row: a column, as it is in x, on the wire and in the output.
//
//   Loaded                                       from x
//   Column encode(p, loaded)                     as on the wire; all lanes of a warp
//   void send(slot, column, value)               to a peer
//   void put(rank, message, begin, end)          a warp: what the block has sent of these columns
//   Column look(slot, column), Column wait(...)  from a peer; puts the sentinels back
//   Output decode(p, value)                      all lanes of a warp
//   void store(p, row, column, output)
#pragma once

#include "cuda/float8.cuh"
#include "cuda/ll_dispatch.h"
#include "cuda/ll_payload.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// Rows of any type as they are, 16 bytes a column.
struct PlainWire {
  using Loaded = uint4;
  using Column = uint4;
  using Output = uint4;

  __device__ static Loaded load(const LlDispatchParams& p, int token, int column) {
    const char* row = p.x + int64_t{token} * p.op.layout.shape.row_bytes;
    return load_constant(reinterpret_cast<const uint4*>(row) + column);
  }
  __device__ static Loaded nothing() { return make_uint4(0, 0, 0, 0); }
  // Also of rows that stay here, so that no row depends on where its token lives.
  __device__ static Column encode(const LlDispatchParams&, const Loaded& loaded) {
    return without_sentinel(loaded);
  }
  __device__ static void send(const LlDispatchParams&, char* slot, int column,
                              const Column& value) {
    store_words(slot + int64_t{column} * 16, value);
  }
  template <class Transport>
  __device__ static void put(const LlContext& ctx, const LlDispatchParams&, int rank,
                             int64_t message, int begin, int end) {
    Transport::put(ctx, rank, message + int64_t{begin} * 16, int64_t{end - begin} * 16);
  }
  __device__ static Column look(const LlDispatchParams&, const char* slot, int column) {
    return load_words(slot + int64_t{column} * 16);
  }
  __device__ static void wait(const LlContext& ctx, const LlDispatchParams&, char* slot, int column,
                              int peer, Column* value) {
    char* at = slot + int64_t{column} * 16;
    wait_for_payload(ctx, at, peer, value);
    restore_sentinels(at);
  }
  __device__ static Output decode(const LlDispatchParams&, const Column& value) { return value; }
  __device__ static void store(const LlDispatchParams& p, int row, int column,
                               const Output& output) {
    char* to = p.tokens + int64_t{row} * p.op.layout.shape.row_bytes;
    store_streaming(reinterpret_cast<uint4*>(to) + column, output);
  }
};

// float8 rows of H bytes, 16 channels a column, then a scale for every 8 columns, which the first
// of the 8 threads moves.
template <RowType kType>
struct QuantizedWire {
  using Vector = RowVector<kType>;
  static constexpr int kVectors = kQuantizedUnit / Vector::kElements;  // of x in a column
  static_assert(kThreadsPerScale == kColumnGroup);

  struct Loaded {
    uint4 v[kVectors];
  };
  struct Column {
    uint4 data;
    uint32_t scale;  // bits; of a message that arrives, in the first thread of the group alone
  };
  struct Output {
    uint4 v[kVectors];  // float8 in the first, or a row's
    uint32_t scale;
  };

  __device__ static int64_t hidden_of(const LlDispatchParams& p) {
    return p.op.layout.shape.row_bytes / row_type_bytes(kType);
  }
  __device__ static bool holds_scale(int column) { return column % kThreadsPerScale == 0; }

  __device__ static Loaded load(const LlDispatchParams& p, int token, int column) {
    const int64_t row_bytes = p.op.layout.shape.row_bytes;
    const auto* row = reinterpret_cast<const uint4*>(p.x + int64_t{token} * row_bytes);
    Loaded loaded = nothing();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = column * kVectors + i;
      if (vector < row_bytes / 16) loaded.v[i] = load_constant(row + vector);
    }
    return loaded;
  }
  __device__ static Loaded nothing() {
    Loaded loaded;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) loaded.v[i] = make_uint4(0, 0, 0, 0);
    return loaded;
  }

  __device__ static Column encode(const LlDispatchParams& p, const Loaded& loaded) {
    float x[kQuantizedUnit];
    unpack(loaded.v, x);
    const QuantizedColumn column = quantize_column(x, p.power_of_two_scales);
    return {without_sentinel(column.data), without_sentinel(__float_as_uint(column.scale))};
  }

  __device__ static int64_t scale_offset(const LlDispatchParams& p, int column) {
    return wire_scales_offset(hidden_of(p)) + int64_t{column / kThreadsPerScale} * 4;
  }
  __device__ static char* scale_at(const LlDispatchParams& p, char* slot, int column) {
    return slot + scale_offset(p, column);
  }
  __device__ static void send(const LlDispatchParams& p, char* slot, int column,
                              const Column& value) {
    store_words(slot + int64_t{column} * 16, value.data);
    if (holds_scale(column)) {
      store_relaxed<kSystemScope>(reinterpret_cast<uint32_t*>(scale_at(p, slot, column)),
                                  value.scale);
    }
  }
  // A part begins with a scale of its own.
  template <class Transport>
  __device__ static void put(const LlContext& ctx, const LlDispatchParams& p, int rank,
                             int64_t message, int begin, int end) {
    PlainWire::put<Transport>(ctx, p, rank, message, begin, end);
    const int scales = (end - begin + kThreadsPerScale - 1) / kThreadsPerScale;
    Transport::put(ctx, rank, message + scale_offset(p, begin), int64_t{4} * scales);
  }
  __device__ static Column look(const LlDispatchParams&, const char* slot, int column) {
    return {load_words(slot + int64_t{column} * 16), 0};
  }
  __device__ static void wait(const LlContext& ctx, const LlDispatchParams& p, char* slot,
                              int column, int peer, Column* value) {
    char* at = slot + int64_t{column} * 16;
    wait_for_payload(ctx, at, peer, &value->data);
    restore_sentinels(at);
    if (!holds_scale(column)) return;
    auto* scale = reinterpret_cast<uint32_t*>(scale_at(p, slot, column));
    value->scale = wait_for_payload_word(ctx, scale, peer);
    store_relaxed<kSystemScope>(scale, kSentinel);
  }

  __device__ static Output decode(const LlDispatchParams& p, const Column& value) {
    Output output;
    output.v[0] = value.data;
    output.scale =
        __shfl_sync(kFullWarp, value.scale, lane_id() / kThreadsPerScale * kThreadsPerScale);
    if (p.output != LlOutput::kDequantized) return output;
    const float scale = __uint_as_float(output.scale);
    const uint32_t words[4] = {value.data.x, value.data.y, value.data.z, value.data.w};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[Vector::kElements];
#pragma unroll
      for (int j = 0; j < Vector::kElements; ++j) {
        const int channel = i * Vector::kElements + j;
        x[j] = __fmul_rn(decode_one(words[channel / 4], channel % 4), scale);
      }
      output.v[i] = Vector::pack(x);
    }
    return output;
  }

  __device__ static void store(const LlDispatchParams& p, int row, int column,
                               const Output& output) {
    if (p.output == LlOutput::kDequantized) return store_row(p, row, column, output);
    const int64_t hidden = hidden_of(p);
    char* to = p.tokens + row * hidden + int64_t{column} * kQuantizedUnit;
    if (hidden % kQuantizedUnit == 0) {
      store_streaming(reinterpret_cast<uint4*>(to), output.v[0]);
    } else {
      const uint32_t words[4] = {output.v[0].x, output.v[0].y, output.v[0].z, output.v[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column * kQuantizedUnit + 4 * i < hidden) reinterpret_cast<uint32_t*>(to)[i] = words[i];
      }
    }
    if (!holds_scale(column)) return;
    p.scales[int64_t{row} * num_scales(hidden) + column / kThreadsPerScale] =
        __uint_as_float(output.scale);
  }

 private:
  __device__ static void unpack(const uint4 (&v)[kVectors], float (&x)[kQuantizedUnit]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float part[Vector::kElements];
      Vector::unpack(v[i], part);
#pragma unroll
      for (int j = 0; j < Vector::kElements; ++j) x[i * Vector::kElements + j] = part[j];
    }
  }
  __device__ static void store_row(const LlDispatchParams& p, int row, int column,
                                   const Output& output) {
    const int64_t row_bytes = p.op.layout.shape.row_bytes;
    auto* to = reinterpret_cast<uint4*>(p.tokens + row * row_bytes);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = column * kVectors + i;
      if (vector < row_bytes / 16) store_streaming(to + vector, output.v[i]);
    }
  }
};

}  // namespace jax_ep::gpu
