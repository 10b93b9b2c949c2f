#include "transport/cuda_memory.h"

#include <future>
#include <memory>
#include <sstream>
#include <thread>

namespace jax_ep::gpu {

namespace {

void enable_peer_access(int from, int to) {
  int possible = 0;
  require_ok(cudaDeviceCanAccessPeer(&possible, from, to), "asking for peer access");
  if (possible == 0) {
    std::ostringstream text;
    text << "GPU " << from << " cannot access the memory of GPU " << to
         << " (no peer access between them, see 'nvidia-smi topo -p2p rw'). Make the mesh of GPUs "
            "that are peers, or pass backend='reference', which uses XLA's collectives.";
    throw std::invalid_argument(text.str());
  }
  const DeviceGuard guard(from);
  const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // XLA was first
    return;
  }
  require_ok(status,
             "peer access from GPU " + std::to_string(from) + " to GPU " + std::to_string(to));
}

}  // namespace

void require_ok(cudaError_t status, const std::string& purpose) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(purpose + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                  ")");
}

DeviceGuard::DeviceGuard(int ordinal) : ordinal_(ordinal), former_(ordinal) {
  require_ok(cudaGetDevice(&former_), "asking for the current GPU");
  if (former_ != ordinal_) {
    require_ok(cudaSetDevice(ordinal_), "making GPU " + std::to_string(ordinal_) + " current");
  }
}

DeviceGuard::~DeviceGuard() {
  if (former_ != ordinal_) cudaSetDevice(former_);
}

DeviceMemory::DeviceMemory(int ordinal, int64_t bytes, const std::string& purpose)
    : ordinal_(ordinal), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceGuard guard(ordinal);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    cudaMemGetInfo(&free_bytes, &all_bytes);
    std::ostringstream text;
    text << purpose << " needs " << bytes << " bytes on GPU " << ordinal << ", of whose "
         << all_bytes << " bytes " << free_bytes << " are free";
    throw CudaError(text.str());
  }
  require_ok(status, purpose);
  data_ = static_cast<char*>(data);
  cudaError_t zeroed = cudaMemset(data_, 0, static_cast<size_t>(bytes));
  // Side streams do not wait for the stream that the memset is on.
  if (zeroed == cudaSuccess) zeroed = cudaStreamSynchronize(nullptr);
  if (zeroed != cudaSuccess) free();
  require_ok(zeroed, "zeroing " + purpose);
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(ordinal_, other.ordinal_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceMemory::free() {
  if (data_ == nullptr) return;
  int former = ordinal_;
  cudaGetDevice(&former);
  cudaSetDevice(ordinal_);
  cudaFree(data_);
  cudaSetDevice(former);
  cudaGetLastError();  // at the exit of the process the driver may be gone
  data_ = nullptr;
}

SideStream::SideStream(int ordinal) : ordinal_(ordinal) {
  const DeviceGuard guard(ordinal);
  require_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
}

SideStream::~SideStream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void SideStream::fill(char* to, int value, int64_t bytes) {
  const DeviceGuard guard(ordinal_);
  require_ok(cudaMemsetAsync(to, value, static_cast<size_t>(bytes), stream_), "clearing memory");
}

void SideStream::write(char* to, const void* from, int64_t bytes) {
  const DeviceGuard guard(ordinal_);
  require_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_),
             "writing to a GPU");
}

void SideStream::read(void* to, const char* from, int64_t bytes) {
  const DeviceGuard guard(ordinal_);
  require_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_),
             "reading from a GPU");
  finish();
}

void SideStream::finish() { require_ok(cudaStreamSynchronize(stream_), "a copy on a GPU"); }

bool devices_idle(const std::vector<int>& ordinals, std::chrono::nanoseconds limit) {
  auto idle = std::make_shared<std::promise<cudaError_t>>();
  std::future<cudaError_t> result = idle->get_future();
  std::thread([idle, ordinals] {
    cudaError_t status = cudaSuccess;
    for (size_t i = 0; i < ordinals.size() && status == cudaSuccess; ++i) {
      status = cudaSetDevice(ordinals[i]);
      if (status == cudaSuccess) status = cudaDeviceSynchronize();
    }
    idle->set_value(status);
  }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return false;
  require_ok(result.get(), "waiting for the GPUs");
  return true;
}

void require_peer_access(const std::vector<int>& ordinals) {
  for (int from : ordinals) {
    for (int to : ordinals) {
      if (from != to) enable_peer_access(from, to);
    }
  }
}

}  // namespace jax_ep::gpu
