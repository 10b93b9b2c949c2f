// Payload words that are their own arrival flags (see ll_window.h), and the records beside them.
#pragma once

#include "cuda/ll_operation.cuh"

namespace jax_ep::gpu {

// The sentinel is a NaN in every row type, also as two or four elements; with the sign bit cleared
// it still is, and the peers can tell it from no word at all.
__device__ inline uint32_t without_sentinel(uint32_t word) {
  return word == kSentinel ? kSentinel >> 1 : word;
}
__device__ inline uint4 without_sentinel(uint4 v) {
  return make_uint4(without_sentinel(v.x), without_sentinel(v.y), without_sentinel(v.z),
                    without_sentinel(v.w));
}
__device__ inline bool has_arrived(uint4 v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}
__device__ inline void restore_sentinels(void* at) {
  store_words(at, make_uint4(kSentinel, kSentinel, kSentinel, kSentinel));
}

// Waits for 16 bytes of a message from `peer`, of which `v` is what a first look has seen. When the
// operation is aborted, whatever is there.
__device__ inline void wait_for_payload(const LlContext& ctx, const void* at, int peer, uint4* v) {
  LlWait bound;
  while (!has_arrived(*v)) {
    if (bound.over(ctx, WaitFor::kRow, peer, v->x)) return;
    *v = load_words(at);
  }
}

// ---- A thread's columns of a row, 16 bytes each.

template <int kUnits>
struct LlColumns {
  uint4 v[kUnits];  // zeros where the thread has no column
};

// Of an input.
template <int kUnits>
__device__ inline LlColumns<kUnits> load_columns(const char* row, const LlItem& item) {
  LlColumns<kUnits> columns = {};
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!item.has(u)) continue;
    columns.v[u] = load_constant(reinterpret_cast<const uint4*>(row) + item.column_of(u));
  }
  return columns;
}
// To an output.
template <int kUnits>
__device__ inline void stream_columns(char* row, const LlItem& item,
                                      const LlColumns<kUnits>& columns) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!item.has(u)) continue;
    store_streaming(reinterpret_cast<uint4*>(row) + item.column_of(u), columns.v[u]);
  }
}

template <int kUnits>
__device__ inline LlColumns<kUnits> without_sentinel(LlColumns<kUnits> columns) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) columns.v[u] = without_sentinel(columns.v[u]);
  return columns;
}
// To a slot of a peer.
template <int kUnits>
__device__ inline void store_columns(char* slot, const LlItem& item,
                                     const LlColumns<kUnits>& columns) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (item.has(u)) store_words(slot + item.column_of(u) * 16, columns.v[u]);
  }
}
// Of a slot here, whether they have come or not.
template <int kUnits>
__device__ inline LlColumns<kUnits> look_at_columns(const char* slot, const LlItem& item) {
  LlColumns<kUnits> columns = {};
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (item.has(u)) columns.v[u] = load_words(slot + item.column_of(u) * 16);
  }
  return columns;
}
template <int kUnits>
__device__ inline bool has_arrived(const LlColumns<kUnits>& columns) {
  bool all = true;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) all = all && has_arrived(columns.v[u]);
  return all;
}
template <int kUnits>
__device__ inline void wait_for_columns(const LlContext& ctx, const char* slot, const LlItem& item,
                                        int peer, LlColumns<kUnits>* columns) {
  LlWait bound;
  while (!has_arrived(*columns)) {
    if (bound.over(ctx, WaitFor::kRow, peer, columns->v[0].x)) return;
    *columns = look_at_columns<kUnits>(slot, item);
  }
}
template <int kUnits>
__device__ inline void restore_sentinels(char* slot, const LlItem& item) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (item.has(u)) restore_sentinels(slot + item.column_of(u) * 16);
  }
}

// ---- Records.

// What the source of a token says of entry k: its route on this rank, or kNoRoute, and its weight.
// Several blocks read it, so that it carries the epoch instead of being cleared.
struct RouteRecord {
  uint32_t route = kNoRoute;
  float weight = 0.0f;
};

__device__ inline void store_record(void* at, uint64_t epoch, uint32_t route, float weight) {
  store_long_words(
      at, make_ulonglong2(epoch_word(epoch, route), epoch_word(epoch, __float_as_uint(weight))));
}

// `words` is what a first look has seen. No route when the operation is aborted.
__device__ inline RouteRecord wait_for_record(const LlContext& ctx, const void* at, int peer,
                                              ulonglong2 words) {
  LlWait bound;
  while (true) {
    if (word_is_of(words.x, ctx.epoch) && word_is_of(words.y, ctx.epoch)) {
      return {word_value(words.x), __uint_as_float(word_value(words.y))};
    }
    if (bound.over(ctx, WaitFor::kRow, peer, words.x)) return {};
    words = load_long_words(at);
  }
}

}  // namespace jax_ep::gpu
