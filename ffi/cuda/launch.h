// What every launcher needs to know of the device it launches on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout/message.h"

namespace jax_ep::gpu {

struct DeviceLimits {
  int num_sms;
  int64_t max_shared_bytes;  // per block, opted in
  bool bulk_copy;            // compute capability 9.0 or more
};

inline cudaError_t device_limits(int device, DeviceLimits* limits) {
  int values[3];
  const cudaDeviceAttr attributes[3] = {cudaDevAttrMultiProcessorCount,
                                        cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                        cudaDevAttrComputeCapabilityMajor};
  for (int i = 0; i < 3; ++i) {
    const cudaError_t error = cudaDeviceGetAttribute(&values[i], attributes[i], device);
    if (error != cudaSuccess) return error;
  }
  *limits = {values[0], values[1], values[2] >= 9};
  return cudaSuccess;
}

// Loads a kernel on the current device, so that no launch has to while a peer spins, and lets it
// use all of the shared memory that its static part leaves.
inline cudaError_t prepare_kernel(const void* kernel) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  DeviceLimits limits;
  error = device_limits(device, &limits);
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int64_t room = limits.max_shared_bytes - static_cast<int64_t>(attributes.sharedSizeBytes);
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(room));
}

// Gives out dynamic shared memory from the front.
class SharedLayout {
 public:
  explicit SharedLayout(int64_t limit) : limit_(limit) {}
  int64_t take(int64_t bytes) {
    const int64_t offset = used_;
    used_ = align_up(used_ + bytes, 128);
    return offset;
  }
  // -1 when there is no room.
  int64_t take_if_room(int64_t bytes) { return used_ + bytes <= limit_ ? take(bytes) : -1; }
  int64_t used() const { return used_; }

 private:
  int64_t limit_;
  int64_t used_ = 0;
};

}  // namespace jax_ep::gpu
