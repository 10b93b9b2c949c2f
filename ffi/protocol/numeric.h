// Row element types and the order of every sum, so that all backends give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout/host_device.h"

namespace jax_ep {

enum class RowType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

JAX_EP_HD constexpr int row_type_bytes(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

// One step of every weighted sum: a single rounding, whatever the compiler and the machine.
JAX_EP_HD inline float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Order of dot products <y, g> over hidden: kDotLanes partial sums, element i going to lane
// i % kDotLanes in ascending order, then folded in halves: lane j += lane j + width for
// width = kDotLanes/2 ... 1. A warp holds the lanes in registers and folds with shuffles.
constexpr int kDotLanes = 256;

}  // namespace jax_ep
