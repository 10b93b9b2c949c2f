// What one thread moves of a row: its columns of the item's part, as they are in x, on the wire and
// in the output.
//
//   Loaded                                     from x
//   Columns encode(p, loaded)                  as on the wire; all lanes of a warp
//   void send(p, slot, item, columns)          to a peer
//   void put(p, rank, message, item)          a warp: what the block has sent
//   Columns look(slot, item), void wait(...)   from a peer; puts the sentinels back
//   Output decode(p, columns)                  all lanes of a warp
//   void store(p, row, item, output)
#pragma once

#include "cuda/float8.cuh"
#include "cuda/ll_dispatch.h"
#include "cuda/ll_payload.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// Rows of any type as they are, 16 bytes a column, kUnits columns to a thread.
template <int kUnits>
struct PlainWire {
  using Loaded = LlColumns<kUnits>;
  using Columns = LlColumns<kUnits>;
  using Output = LlColumns<kUnits>;

  __device__ static Loaded load(const LlDispatchParams& p, const LlItem& item) {
    const char* row = p.x + int64_t{item.token} * p.op.layout.shape.row_bytes;
    return load_columns<kUnits>(row, item);
  }
  // Also of rows that stay here, so that no row depends on where its token lives.
  __device__ static Columns encode(const LlDispatchParams&, const Loaded& loaded) {
    return without_sentinel(loaded);
  }
  __device__ static void send(const LlDispatchParams&, char* slot, const LlItem& item,
                              const Columns& columns) {
    store_columns(slot, item, columns);
  }
  template <class Transport>
  __device__ static void put(const LlContext& ctx, const LlDispatchParams&, int rank,
                             int64_t message, const LlItem& item) {
    Transport::put(ctx, rank, message + int64_t{item.begin()} * 16, int64_t{item.size()} * 16);
  }
  __device__ static Columns look(const LlDispatchParams&, const char* slot, const LlItem& item) {
    return look_at_columns<kUnits>(slot, item);
  }
  __device__ static void wait(const LlContext& ctx, const LlDispatchParams&, char* slot,
                              const LlItem& item, int peer, Columns* columns) {
    wait_for_columns(ctx, slot, item, peer, columns);
    restore_sentinels<kUnits>(slot, item);
  }
  __device__ static Output decode(const LlDispatchParams&, const Columns& columns) {
    return columns;
  }
  __device__ static void store(const LlDispatchParams& p, int row, const LlItem& item,
                               const Output& output) {
    stream_columns(p.tokens + int64_t{row} * p.op.layout.shape.row_bytes, item, output);
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
  struct Columns {
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
  __device__ static bool holds_scale(const LlItem& item) {
    return item.column % kThreadsPerScale == 0;
  }

  __device__ static Loaded load(const LlDispatchParams& p, const LlItem& item) {
    const int64_t row_bytes = p.op.layout.shape.row_bytes;
    const auto* row = reinterpret_cast<const uint4*>(p.x + int64_t{item.token} * row_bytes);
    Loaded loaded = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = item.column * kVectors + i;
      if (item.has(0) && vector < row_bytes / 16) loaded.v[i] = load_constant(row + vector);
    }
    return loaded;
  }

  __device__ static Columns encode(const LlDispatchParams& p, const Loaded& loaded) {
    float x[kQuantizedUnit];
    unpack(loaded.v, x);
    const QuantizedColumn column = quantize_column(x, p.power_of_two_scales);
    return {without_sentinel(column.data), without_sentinel(__float_as_uint(column.scale))};
  }

  __device__ static int64_t scale_offset(const LlDispatchParams& p, int column) {
    return wire_scales_offset(hidden_of(p)) + int64_t{column / kThreadsPerScale} * 4;
  }
  __device__ static uint32_t* scale_at(const LlDispatchParams& p, char* slot, const LlItem& item) {
    return reinterpret_cast<uint32_t*>(slot + scale_offset(p, item.column));
  }
  __device__ static void send(const LlDispatchParams& p, char* slot, const LlItem& item,
                              const Columns& columns) {
    store_words(slot + int64_t{item.column} * 16, columns.data);
    if (holds_scale(item)) store_relaxed<kSystemScope>(scale_at(p, slot, item), columns.scale);
  }
  // A part begins with a scale of its own.
  template <class Transport>
  __device__ static void put(const LlContext& ctx, const LlDispatchParams& p, int rank,
                             int64_t message, const LlItem& item) {
    PlainWire<1>::put<Transport>(ctx, p, rank, message, item);
    const int scales = (item.size() + kThreadsPerScale - 1) / kThreadsPerScale;
    Transport::put(ctx, rank, message + scale_offset(p, item.begin()), int64_t{4} * scales);
  }
  __device__ static Columns look(const LlDispatchParams&, const char* slot, const LlItem& item) {
    return {load_words(slot + int64_t{item.column} * 16), 0};
  }
  __device__ static void wait(const LlContext& ctx, const LlDispatchParams& p, char* slot,
                              const LlItem& item, int peer, Columns* columns) {
    char* at = slot + int64_t{item.column} * 16;
    wait_for_payload(ctx, at, peer, &columns->data);
    restore_sentinels(at);
    if (!holds_scale(item)) return;
    uint32_t* scale = scale_at(p, slot, item);
    columns->scale = wait_for_payload_word(ctx, scale, peer);
    store_relaxed<kSystemScope>(scale, kSentinel);
  }

  __device__ static Output decode(const LlDispatchParams& p, const Columns& columns) {
    Output output;
    output.v[0] = columns.data;
    output.scale =
        __shfl_sync(kFullWarp, columns.scale, lane_id() / kThreadsPerScale * kThreadsPerScale);
    if (p.output != LlOutput::kDequantized) return output;
    const float scale = __uint_as_float(output.scale);
    const uint32_t words[4] = {columns.data.x, columns.data.y, columns.data.z, columns.data.w};
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

  __device__ static void store(const LlDispatchParams& p, int row, const LlItem& item,
                               const Output& output) {
    const int column = item.column;
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
    if (!holds_scale(item)) return;
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
