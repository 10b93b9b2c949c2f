// What the host compiler and nvcc compile from the same text is marked so.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HD __host__ __device__
#else
#define JAX_EP_HD
#endif

namespace jax_ep {

// Of numbers that are not negative. One instruction on a GPU, where signed factors may take four.
JAX_EP_HD constexpr int64_t wide_product(int a, int b) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(a)) *
                              static_cast<uint32_t>(b));
}

}  // namespace jax_ep
