// CUDA devices, memory and streams as types that own them. Host code: no kernel is launched here.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace jax_ep::gpu {

// A CUDA call that failed; the text says what it was for.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws CudaError, and leaves no error behind for the next one who asks the runtime.
void require_ok(cudaError_t status, const std::string& purpose);

// Makes a device current; at the end of the scope the former one is current again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int ordinal_;
  int former_;
};

// Zeroed memory of one device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Throws CudaError whose text gives the bytes, and the bytes that were free.
  DeviceMemory(int ordinal, int64_t bytes, const std::string& purpose);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory() { free(); }

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void free();
  // The memory stays until the process exits.
  void keep_for_ever() { data_ = nullptr; }

 private:
  int ordinal_ = 0;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Zeroed page-locked host memory that a device can write: one T, and its address on either side. It
// stays until the process exits, since a kernel may hold the address as long.
template <class T>
class MappedHost {
 public:
  explicit MappedHost(int ordinal) {
    const DeviceGuard guard(ordinal);
    void* host = nullptr;
    void* device = nullptr;
    require_ok(cudaHostAlloc(&host, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable),
               "page-locked memory for error records");
    host_ = new (host) T{};
    require_ok(cudaHostGetDevicePointer(&device, host, 0), "the device's address of host memory");
    device_ = static_cast<T*>(device);
  }

  T* host() const { return host_; }
  T* device() const { return device_; }

 private:
  T* host_ = nullptr;
  T* device_ = nullptr;
};

// A stream that no other stream waits for: small copies on it go past kernels that spin.
class SideStream {
 public:
  explicit SideStream(int ordinal);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  void fill(char* to, int value, int64_t bytes);
  void write(char* to, const void* from, int64_t bytes);
  void read(void* to, const char* from, int64_t bytes);
  // All of the above has happened.
  void finish();
  cudaStream_t stream() const { return stream_; }

 private:
  int ordinal_;
  cudaStream_t stream_ = nullptr;
};

// Waits until everything that was launched on the devices has ended, whatever streams it is on;
// false after `limit`. Throws CudaError when a kernel of anybody's has failed.
bool devices_idle(const std::vector<int>& ordinals, std::chrono::nanoseconds limit);

// Lets every device load and store in the memory of every other. Throws std::invalid_argument that
// names the first pair of which one cannot.
void require_peer_access(const std::vector<int>& ordinals);

}  // namespace jax_ep::gpu
