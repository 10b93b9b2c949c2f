// Rows as 16-byte vectors: conversion to float32 and back, weighted sums, dot products, fills.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx.cuh"
#include "protocol/numeric.h"

namespace jax_ep::gpu {

template <RowType kType>
struct RowVector {
  static constexpr int kElements = 16 / row_type_bytes(kType);

  __device__ static void unpack(uint4 v, float (&out)[kElements]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == RowType::kFloat32) {
        out[i] = __uint_as_float(words[i]);
      } else if constexpr (kType == RowType::kBFloat16) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
      }
    }
  }

  // Rounds to nearest, ties to even.
  __device__ static uint4 pack(const float (&in)[kElements]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == RowType::kFloat32) {
        words[i] = __float_as_uint(in[i]);
      } else if constexpr (kType == RowType::kBFloat16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ static void add_weighted(float (&sum)[kElements], uint4 v, float weight) {
    float x[kElements];
    unpack(v, x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = fused_multiply_add(weight, x[i], sum[i]);
  }
};

// A warp's dot product in the order of protocol/numeric.h. Each step of the warp over a row covers
// kDotLanes elements: lane l of the warp holds, for each of its kVectors vectors v, the kElements
// dot lanes from (v * 32 + l) * kElements on.
template <RowType kType>
struct WarpDot {
  static constexpr int kElements = RowVector<kType>::kElements;
  static constexpr int kVectors = kDotLanes / (kWarp * kElements);
  static_assert(kVectors * kWarp * kElements == kDotLanes);

  float lanes[kVectors][kElements] = {};

  __device__ void add(int vector, const float (&a)[kElements], const float (&b)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      lanes[vector][i] = fused_multiply_add(a[i], b[i], lanes[vector][i]);
    }
  }

  // The sum, in lane 0: widths kDotLanes/2 ... 1.
  __device__ float fold() {
#pragma unroll
    for (int width = kVectors / 2; width >= 1; width /= 2) {
#pragma unroll
      for (int v = 0; v < width; ++v) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) lanes[v][i] += lanes[v + width][i];
      }
    }
#pragma unroll
    for (int distance = kWarp / 2; distance >= 1; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        lanes[0][i] += __shfl_down_sync(kFullWarp, lanes[0][i], distance);
      }
    }
#pragma unroll
    for (int width = kElements / 2; width >= 1; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) lanes[0][i] += lanes[0][i + width];
    }
    return lanes[0][0];
  }
};

// Two elements of a quiet NaN.
JAX_EP_HD constexpr uint32_t nan_word(RowType type) {
  return type == RowType::kFloat32    ? 0x7FC00000u
         : type == RowType::kBFloat16 ? 0x7FC07FC0u
                                      : 0x7E007E00u;
}

// The calling threads are numbered `thread` of `num_threads`.
template <class T>
__device__ void fill(T* to, int64_t count, T value, int thread, int num_threads) {
#pragma unroll 1
  for (int64_t i = thread; i < count; i += num_threads) to[i] = value;
}

// All threads of a block overwrite a floating output with NaN.
__device__ inline void fill_nan(char* to, int64_t bytes, RowType type) {
  fill(reinterpret_cast<uint32_t*>(to), bytes / 4, nan_word(type), threadIdx.x, blockDim.x);
}

__device__ inline void zero_vectors(char* to, int64_t num_vectors, int thread, int num_threads) {
  auto* vectors = reinterpret_cast<uint4*>(to);
#pragma unroll 1
  for (int64_t v = thread; v < num_vectors; v += num_threads) {
    store_streaming(vectors + v, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace jax_ep::gpu
