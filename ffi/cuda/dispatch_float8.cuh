// What becomes of a packed row where it is expanded: float8 values and scales, or a row again.
#pragma once

#include "cuda/dispatch_rows.cuh"
#include "cuda/ll_wire.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {

// Where a packed row lies: in shared memory, or in a window or an operand.
enum class Packed { kShared, kGlobal };

template <Packed kWhere, class T>
__device__ T load_packed(const char* from) {
  if constexpr (kWhere == Packed::kShared) {
    return *reinterpret_cast<const T*>(from);
  } else if constexpr (sizeof(T) == 16) {
    return load_streaming(reinterpret_cast<const uint4*>(from));
  } else {
    return load_relaxed<kDeviceScope>(reinterpret_cast<const T*>(from));
  }
}

// A warp copies `bytes`, a multiple of 4.
template <Packed kWhere>
__device__ void copy_packed(const char* from, char* to, int64_t bytes) {
  if (bytes % 16 == 0) {
    for (int64_t at = 16 * lane_id(); at < bytes; at += 16 * kWarp) {
      store_streaming(reinterpret_cast<uint4*>(to + at), load_packed<kWhere, uint4>(from + at));
    }
    return;
  }
  for (int64_t at = 4 * lane_id(); at < bytes; at += 4 * kWarp) {
    *reinterpret_cast<uint32_t*>(to + at) = load_packed<kWhere, uint32_t>(from + at);
  }
}

// Values and scales, to the row that each lane of `lanes` holds.
template <Packed kWhere>
__device__ void store_pairs(const DispatchParams& p, const char* packed, int64_t row,
                            unsigned lanes) {
  const int groups = num_scales(p.hidden);
  bool copied = false;
#if defined(JAX_EP_BULK_COPY)
  if (kWhere == Packed::kShared && p.hidden % 16 == 0) {
    copied = true;
    if (lanes >> lane_id() & 1) {
      bulk_store_evict_first(p.tokens + row * p.hidden, packed, static_cast<uint32_t>(p.hidden));
    }
  }
#endif
  for (; lanes != 0; lanes &= lanes - 1) {
    const int64_t to = __shfl_sync(kFullWarp, row, __ffs(lanes) - 1);
    if (!copied) copy_packed<kWhere>(packed, p.tokens + to * p.hidden, p.hidden);
    for (int g = lane_id(); g < groups; g += kWarp) {
      p.scales[to * groups + g] =
          load_packed<kWhere, float>(packed + p.hidden + int64_t{g} * int64_t{sizeof(float)});
    }
  }
}

// Rows of p.row_type, likewise. A lane makes 16 bytes at a time, which lie in one group.
template <RowType kType, Packed kWhere>
__device__ void store_dequantized(const DispatchParams& p, const char* packed, int64_t row,
                                  unsigned lanes) {
  using Vector = RowVector<kType>;
  constexpr int kWords = Vector::kElements / 4;
  const int64_t row_bytes = p.output_row_bytes();
  const int num_vectors = static_cast<int>(row_bytes / 16);
  for (int first = 0; first < num_vectors; first += kWarp) {
    const int vector = first + lane_id();
    uint4 output = make_uint4(0, 0, 0, 0);
    if (vector < num_vectors) {
      const int64_t channel = int64_t{vector} * Vector::kElements;
      const int64_t group = channel / kScaleGroup;
      const float scale =
          load_packed<kWhere, float>(packed + p.hidden + group * int64_t{sizeof(float)});
      float x[Vector::kElements];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const auto word = load_packed<kWhere, uint32_t>(packed + channel + 4 * w);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * w + i] = __fmul_rn(decode_one(word, i), scale);
      }
      output = Vector::pack(x);
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const int64_t to = __shfl_sync(kFullWarp, row, __ffs(left) - 1);
      if (vector >= num_vectors) continue;
      store_streaming(reinterpret_cast<uint4*>(p.tokens + to * row_bytes) + vector, output);
    }
  }
}

// A warp: the packed row of a message goes to the output rows of its entries, of which lane k holds
// entry k's, or once to its slot. A call, so that it shares no registers with what is on the way.
template <Packed kWhere>
__device__ __noinline__ void store_packed_row(const DispatchParams& p, MessageId id, int row,
                                              const char* packed) {
  const int64_t to = target_row(p, id, row);
  const unsigned lanes = __ballot_sync(kFullWarp, to >= 0);
  if (lanes == 0) return;
  if (p.scales != nullptr) return store_pairs<kWhere>(p, packed, to, lanes);
  switch (p.row_type) {
    case RowType::kFloat32:
      return store_dequantized<RowType::kFloat32, kWhere>(p, packed, to, lanes);
    case RowType::kBFloat16:
      return store_dequantized<RowType::kBFloat16, kWhere>(p, packed, to, lanes);
    case RowType::kFloat16:
      return store_dequantized<RowType::kFloat16, kWhere>(p, packed, to, lanes);
  }
}

}  // namespace jax_ep::gpu
