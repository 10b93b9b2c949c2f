#include "transport/cuda_ipc.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "transport/cuda_memory.h"

namespace jax_ep::gpu {

namespace {

void unmap(char* memory) {
  if (memory == nullptr) return;
  cudaIpcCloseMemHandle(memory);
  cudaGetLastError();  // at the exit of the process the driver may be gone
}

}  // namespace

MemoryOffer offer_memory(int group, int rank, int ordinal, const PeerMemory& memory) {
  const DeviceGuard guard(ordinal);
  MemoryOffer offer{group, rank, {}, {}};
  const std::string purpose = "offering memory of GPU " + std::to_string(ordinal);
  require_ok(cudaIpcGetMemHandle(&offer.data, memory.data), purpose);
  require_ok(cudaIpcGetMemHandle(&offer.control, memory.control), purpose);
  return offer;
}

std::string to_bytes(const std::vector<MemoryOffer>& offers) {
  std::string bytes(offers.size() * sizeof(MemoryOffer), '\0');
  std::memcpy(bytes.data(), offers.data(), bytes.size());
  return bytes;
}

std::vector<MemoryOffer> offers_from(const std::string& bytes) {
  if (bytes.size() % sizeof(MemoryOffer) != 0) {
    throw std::invalid_argument("an offer of " + std::to_string(bytes.size()) +
                                " bytes is no multiple of " + std::to_string(sizeof(MemoryOffer)) +
                                ": start the same jax_ep in all processes");
  }
  std::vector<MemoryOffer> offers(bytes.size() / sizeof(MemoryOffer));
  std::memcpy(offers.data(), bytes.data(), bytes.size());
  return offers;
}

MappedMemory::MappedMemory(int ordinal, const MemoryOffer& offer)
    : ordinal_(ordinal), rank_(offer.rank) {
  memory_.data = map(offer.data);
  try {
    memory_.control = map(offer.control);
  } catch (...) {
    unmap(memory_.data);
    throw;
  }
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : ordinal_(other.ordinal_), rank_(other.rank_), memory_(std::exchange(other.memory_, {})) {}

MappedMemory::~MappedMemory() {
  if (memory_.data == nullptr && memory_.control == nullptr) return;
  int former = ordinal_;
  cudaGetDevice(&former);
  cudaSetDevice(ordinal_);
  unmap(memory_.data);
  unmap(memory_.control);
  cudaSetDevice(former);
}

char* MappedMemory::map(const cudaIpcMemHandle_t& handle) {
  const DeviceGuard guard(ordinal_);
  void* memory = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
  const std::string what =
      "GPU " + std::to_string(ordinal_) + " and the GPU of rank " + std::to_string(rank_);
  if (status == cudaErrorPeerAccessUnsupported || status == cudaErrorInvalidDevice) {
    cudaGetLastError();
    throw std::invalid_argument(
        what +
        ", which is another process's, have no peer access to each other. Make the mesh of GPUs "
        "that are peers, or pass backend='reference', which uses XLA's collectives.");
  }
  require_ok(status, "mapping memory between " + what);
  return static_cast<char*>(memory);
}

}  // namespace jax_ep::gpu
