// Rows to float8 and back. A thread has a column of kQuantizedUnit channels; the threads of the
// columns that share a scale are neighbours in one warp.
#pragma once

#include <cuda_fp8.h>

#include "cuda/ptx.cuh"
#include "protocol/quantize.h"

namespace jax_ep::gpu {

constexpr int kThreadsPerScale = kScaleGroup / kQuantizedUnit;

__device__ inline uint32_t encode_four(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#else
  return static_cast<uint32_t>(encode_e4m3(a)) | static_cast<uint32_t>(encode_e4m3(b)) << 8 |
         static_cast<uint32_t>(encode_e4m3(c)) << 16 | static_cast<uint32_t>(encode_e4m3(d)) << 24;
#endif
}
__device__ inline float decode_one(uint32_t word, int byte) {
  const auto code = static_cast<uint8_t>(word >> (8 * byte));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
#else
  return decode_e4m3(code);
#endif
}

struct QuantizedColumn {
  uint4 data;
  float scale;
};
// All lanes of a warp. x becomes multiples of the scale.
__device__ inline QuantizedColumn quantize_column(float (&x)[kQuantizedUnit],
                                                  bool power_of_two_scales) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuantizedUnit; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int distance = kThreadsPerScale / 2; distance >= 1; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, distance));
  }
  const GroupScale scale = group_scale(amax, power_of_two_scales);
#pragma unroll
  for (int i = 0; i < kQuantizedUnit; ++i) x[i] = __fmul_rn(x[i], scale.inverse);
  return {
      make_uint4(encode_four(x[0], x[1], x[2], x[3]), encode_four(x[4], x[5], x[6], x[7]),
                 encode_four(x[8], x[9], x[10], x[11]), encode_four(x[12], x[13], x[14], x[15])),
      scale.scale};
}

}  // namespace jax_ep::gpu
