// Shared memory that a kernel has not written holds what the kernels before it left there, which
// mostly does no harm. The tests fill it with words that do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep::gpu::test {

// As a row or an index, far outside of everything; as a flag, set.
constexpr uint32_t kSharedPoison = 0x5A5A5A5Au;

__global__ void poison_shared_kernel(int words) {
  extern __shared__ uint32_t poisoned[];
  volatile uint32_t* const to = poisoned;
  for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = kSharedPoison;
}

// On the current device, where nothing else runs. Returns when it is done.
inline cudaError_t poison_shared_memory() {
  int device = 0;
  int num_sms = 0;
  int bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(poison_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes);
  if (error != cudaSuccess) return error;
  // All of a multiprocessor's memory to a block: two on each, one after the other.
  poison_shared_kernel<<<2 * num_sms, 256, bytes>>>(bytes / 4);
  error = cudaGetLastError();
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

}  // namespace jax_ep::gpu::test
