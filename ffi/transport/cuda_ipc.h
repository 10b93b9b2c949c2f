// Memory of a GPU that another process of this host has allocated.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "transport/window.h"

namespace jax_ep::gpu {

// How one rank's process lets the others map its memory; as bytes, from process to process.
struct MemoryOffer {
  int group;
  int rank;
  cudaIpcMemHandle_t data;
  cudaIpcMemHandle_t control;
};

// Throws CudaError, naming what was asked of CUDA.
MemoryOffer offer_memory(int group, int rank, int ordinal, const PeerMemory& memory);

std::string to_bytes(const std::vector<MemoryOffer>& offers);
// Throws std::invalid_argument for bytes of another length than offers have.
std::vector<MemoryOffer> offers_from(const std::string& bytes);

// A mapping on one GPU; gone with the object.
class MappedMemory {
 public:
  // Throws std::invalid_argument when that GPU cannot access the owner's, CudaError otherwise.
  MappedMemory(int ordinal, const MemoryOffer& offer);
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(MappedMemory&&) = delete;
  ~MappedMemory();

  int rank() const { return rank_; }
  const PeerMemory& memory() const { return memory_; }
  // When something may still use it: it stays until the process ends.
  void keep_for_ever() { memory_ = {}; }

 private:
  char* map(const cudaIpcMemHandle_t& handle);

  int ordinal_;
  int rank_;
  PeerMemory memory_{};
};

}  // namespace jax_ep::gpu
