// The functions of NVSHMEM's that kernels call, by addresses in this rank's own memory. They are
// compiled in cuda_nvshmem.cu alone: NVSHMEM's headers cost a file more time than our kernels do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_ep::gpu::nvshmem {

// One thread: a word of another element, which arrives whole.
__device__ void put_word(uint32_t* own_word, uint32_t value, int pe);
__device__ void put_word(uint64_t* own_word, uint64_t value, int pe);

// A warp: bytes from its own send region. They need not have left when this returns.
__device__ void put_warp(void* own_target, const void* source, size_t bytes, int pe);

// One thread: what this GPU puts from here on arrives after what it has put before.
__device__ void fence();
// One thread: what this GPU has put has arrived.
__device__ void quiet();

// One thread: whether a word of our own memory has this value, and what came before it is there.
__device__ bool test_word(uint32_t* own_word, uint32_t value);

}  // namespace jax_ep::gpu::nvshmem
