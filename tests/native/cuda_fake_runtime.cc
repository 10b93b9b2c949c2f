#include "cuda_fake_runtime.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace {

std::mutex mutex;
std::map<void*, int64_t> allocations;
thread_local int current_device = 0;

}  // namespace

FakeCuda& fake_cuda() {
  static FakeCuda fake;
  return fake;
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake_cuda().num_devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= fake_cuda().num_devices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 132
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : 232448;  // shared memory
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = fake_cuda().peers_reachable ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorPeerAccessAlreadyEnabled; }
cudaError_t cudaDeviceSynchronize() {
  std::this_thread::sleep_for(std::chrono::milliseconds(fake_cuda().busy_ms));
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto size = static_cast<int64_t>(bytes);
  if (fake_cuda().used_bytes + size > fake_cuda().memory_bytes) return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xA5, bytes);
  allocations[*memory] = size;
  fake_cuda().used_bytes += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::lock_guard<std::mutex> lock(mutex);
  fake_cuda().used_bytes -= allocations.at(memory);
  allocations.erase(memory);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  std::memcpy(handle->reserved, &memory, sizeof(memory));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  std::memcpy(memory, handle.reserved, sizeof(*memory));
  ++fake_cuda().mapped;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  --fake_cuda().mapped;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes) {
  *all_bytes = static_cast<size_t>(fake_cuda().memory_bytes);
  *free_bytes = *all_bytes - static_cast<size_t>(fake_cuda().used_bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

}  // extern "C"
