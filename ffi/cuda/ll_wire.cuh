// What one thread moves of a row: its columns of the item's part, as they are in x, on the wire and
// in the output.
//
//   Loaded                                     from x
//   Columns encode(p, loaded)                  as on the wire; all lanes of a warp
//   void send(p, slot, item, columns)          to a peer
//   void put(p, rank, message, item)          a warp: what the block has sent
//   Columns look(slot, item), void wait(...)   from a peer; puts the sentinels back
//   Output decode(p, columns)                  all lanes of a warp
//   Place place(p, item)                       in row 0 of the output
//   void store(place, row, item, output)       of a thread that has columns
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
    return load_columns<kUnits>(p.x + wide_product(item.token, p.plan.row.bytes), item);
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
    Transport::put(ctx, rank, message + item.begin() * 16, item.size() * 16);
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

  struct Place {
    char* at;
    int row_bytes;
  };
  __device__ static Place place(const LlDispatchParams& p, const LlItem&) {
    return {p.tokens, p.plan.row.output_bytes};
  }
  __device__ static void store(const Place& place, int row, const LlItem& item,
                               const Output& output) {
    stream_columns(place.at + wide_product(row, place.row_bytes), item, output);
  }
};

// float8 rows of H bytes, 16 channels a column, then a scale for every 8 columns, which the first
// of the 8 threads moves.
template <RowType kType, bool kDequantizes>
struct QuantizedWire {
  using Vector = RowVector<kType>;
  static constexpr int kVectors = kQuantizedUnit / Vector::kElements;  // of x in a column
  static constexpr int kOutputVectors = kDequantizes ? kVectors : 1;
  static_assert(kThreadsPerScale == kColumnGroup);

  struct Loaded {
    uint4 v[kVectors];
  };
  struct Columns {
    uint4 data;
    uint32_t scale;  // bits; of a message that arrives, in the first thread of the group alone
  };
  struct Output {
    uint4 v[kOutputVectors];
    uint32_t scale;  // of float8
  };

  __device__ static int group_of(int column) {
    return static_cast<int>(static_cast<unsigned>(column) / kThreadsPerScale);
  }
  __device__ static bool holds_scale(const LlItem& item) {
    return static_cast<unsigned>(item.column) % kThreadsPerScale == 0;
  }

  __device__ static Loaded load(const LlDispatchParams& p, const LlItem& item) {
    const auto* row =
        reinterpret_cast<const uint4*>(p.x + wide_product(item.token, p.plan.row.bytes));
    Loaded loaded = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = item.column * kVectors + i;
      if (item.has(0) && vector < p.plan.row.bytes / 16) loaded.v[i] = load_constant(row + vector);
    }
    return loaded;
  }

  __device__ static Columns encode(const LlDispatchParams& p, const Loaded& loaded) {
    float x[kQuantizedUnit];
    unpack(loaded.v, x);
    const QuantizedColumn column = quantize_column(x, p.power_of_two_scales);
    return {without_sentinel(column.data), without_sentinel(__float_as_uint(column.scale))};
  }

  __device__ static int scale_offset(const LlDispatchParams& p, int column) {
    return p.plan.row.scales_offset + group_of(column) * 4;
  }
  __device__ static uint32_t* scale_at(const LlDispatchParams& p, char* slot, const LlItem& item) {
    return reinterpret_cast<uint32_t*>(slot + scale_offset(p, item.column));
  }
  __device__ static void send(const LlDispatchParams& p, char* slot, const LlItem& item,
                              const Columns& columns) {
    store_words(slot + item.column * 16, columns.data);
    if (holds_scale(item)) store_relaxed<kSystemScope>(scale_at(p, slot, item), columns.scale);
  }
  // A part begins with a scale of its own.
  template <class Transport>
  __device__ static void put(const LlContext& ctx, const LlDispatchParams& p, int rank,
                             int64_t message, const LlItem& item) {
    PlainWire<1>::put<Transport>(ctx, p, rank, message, item);
    const int scales = (item.size() + kThreadsPerScale - 1) / kThreadsPerScale;
    Transport::put(ctx, rank, message + scale_offset(p, item.begin()), 4 * scales);
  }
  // The scale is asked for with its columns: after them, it would cost another way to memory.
  __device__ static Columns look(const LlDispatchParams& p, char* slot, const LlItem& item) {
    Columns columns{load_words(slot + item.column * 16), 0};
    if (holds_scale(item)) columns.scale = load_relaxed<kSystemScope>(scale_at(p, slot, item));
    return columns;
  }
  __device__ static void wait(const LlContext& ctx, const LlDispatchParams& p, char* slot,
                              const LlItem& item, int peer, Columns* columns) {
    LlWait bound;
    while (!has_arrived(columns->data) || columns->scale == kSentinel) {
      if (bound.over(ctx, WaitFor::kRow, peer, columns->data.x)) break;
      *columns = look(p, slot, item);
    }
    restore_sentinels(slot + item.column * 16);
    if (holds_scale(item)) store_relaxed<kSystemScope>(scale_at(p, slot, item), kSentinel);
  }

  // To float8, this thread's column. To rows, of a warp's vectors those that make its stores
  // contiguous: vector i is number 32 i + lane.
  __device__ static Output decode(const LlDispatchParams&, const Columns& columns) {
    Output output;
    if constexpr (kDequantizes) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) output.v[i] = dequantize(columns, i * kWarp + lane_id());
    } else {
      output.v[0] = columns.data;
      output.scale = scale_from(columns, lane_id());
    }
    return output;
  }

  struct Place {
    char* at;  // of this thread's first vector
    int row_bytes;
    int bytes;       // from there to the part's end
    float* scale;    // null: it is another thread's, or there is none
    int num_scales;  // of a row
  };
  __device__ static Place place(const LlDispatchParams& p, const LlItem& item) {
    constexpr int kBytes = kOutputVectors * 16;  // of a column
    const LlRowSizes& row = p.plan.row;
    const int warp_begin = (item.column - lane_id()) * kBytes;
    const int offset = warp_begin + lane_id() * 16;
    const int end = min(row.output_bytes, (item.column + item.left) * kBytes);
    const bool scale = !kDequantizes && item.has(0) && holds_scale(item);
    return {p.tokens + offset, row.output_bytes, end - offset,
            scale ? p.scales + group_of(item.column) : nullptr, row.num_scales};
  }
  __device__ static void store(const Place& place, int row, const LlItem&, const Output& output) {
    char* to = place.at + wide_product(row, place.row_bytes);
    if (!kDequantizes && place.row_bytes % 16 != 0) {
      store_words_of(to, place.bytes, output.v[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kOutputVectors; ++i) {
        const int at = i * kWarp * 16;
        if (at < place.bytes) store_streaming(reinterpret_cast<uint4*>(to + at), output.v[i]);
      }
    }
    if (place.scale == nullptr) return;
    place.scale[wide_product(row, place.num_scales)] = __uint_as_float(output.scale);
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
  // All lanes: the scale of a lane's column.
  __device__ static uint32_t scale_from(const Columns& columns, int lane) {
    return __shfl_sync(kFullWarp, columns.scale, lane / kThreadsPerScale * kThreadsPerScale);
  }
  // All lanes: a vector of those that the warp's columns make.
  __device__ static uint4 dequantize(const Columns& columns, int vector) {
    constexpr int kWords = 4 / kVectors;  // of a column, that make a vector
    const int lane = vector / kVectors;
    const int first = vector % kVectors * kWords;
    const uint32_t column[4] = {columns.data.x, columns.data.y, columns.data.z, columns.data.w};
    uint32_t words[kWords] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = __shfl_sync(kFullWarp, column[i], lane);
      if (i / kWords * kWords == first) words[i % kWords] = word;
    }
    const float scale = __uint_as_float(scale_from(columns, lane));
    float x[Vector::kElements];
#pragma unroll
    for (int j = 0; j < Vector::kElements; ++j) {
      x[j] = __fmul_rn(decode_one(words[j / 4], j % 4), scale);
    }
    return Vector::pack(x);
  }
  // A call: it is rare, and would be there several times.
  __device__ __noinline__ static void store_words_of(char* to, int bytes, uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * i < bytes) reinterpret_cast<uint32_t*>(to)[i] = words[i];
    }
  }
};

}  // namespace jax_ep::gpu
