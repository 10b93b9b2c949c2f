#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/nvshmem_calls.cuh"

namespace jax_ep::gpu::nvshmem {

__device__ void put_word(uint32_t* own_word, uint32_t value, int pe) {
  nvshmem_uint32_p(own_word, value, pe);
}
__device__ void put_word(uint64_t* own_word, uint64_t value, int pe) {
  nvshmem_uint64_p(own_word, value, pe);
}

__device__ void put_warp(void* own_target, const void* source, size_t bytes, int pe) {
  nvshmemx_putmem_nbi_warp(own_target, source, bytes, pe);
}

__device__ void fence() { nvshmem_fence(); }
__device__ void quiet() { nvshmem_quiet(); }

__device__ bool test_word(uint32_t* own_word, uint32_t value) {
  return nvshmem_uint32_test(own_word, NVSHMEM_CMP_EQ, value) != 0;
}

}  // namespace jax_ep::gpu::nvshmem
