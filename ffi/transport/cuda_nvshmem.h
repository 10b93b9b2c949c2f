// NVSHMEM in this process, and the memory of its heap that buffers use. Everything that says so is
// collective: all processes of the world call it together and in the same order, or wait for ever.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/cuda_symmetric.h"

namespace jax_ep::gpu {

// Which process of which world this one is. A world is made once in the life of a process.
struct NvshmemPlace {
  std::vector<int> processes;  // in the order of their processing elements, by JAX's indices
  int pe;
};

// Whether anybody in this process has started NVSHMEM.
bool nvshmem_started();
// What one process gives to all others of a world that is to be.
std::string nvshmem_unique_id();

// Starts NVSHMEM on the GPU, or joins what somebody else has started here. Collective the first
// time. Throws std::invalid_argument when NVSHMEM has been started for other processes, CudaError
// when it does not start.
void join_nvshmem(int ordinal, const NvshmemPlace& place, const std::string& unique_id);

// The memory of a buffer to be, of whose group this process has one rank.
class NvshmemMemory : public SymmetricMemory {
 public:
  // pes: of the ranks. only_puts: nobody is written to directly, whoever can be. control_bytes: of
  // the control block and what lasts beside it. Collective. Throws CudaError when the heap has no
  // room for control blocks.
  NvshmemMemory(int ordinal, std::vector<int> pes, bool only_puts, int64_t control_bytes);
  ~NvshmemMemory() override { give_back(); }

  // Whether there are ranks that only puts reach.
  bool needs_staging() const;
  // Not collective: throws CudaError when the GPU has no memory left for the heap to grow by a new
  // window. NVSHMEM, asked all the same, leaves the process unfit for anything else.
  void require_room(int64_t bytes) const;
  // Takes the window: one that was given back, by its number in given_back(), or, where it is
  // negative, a new one, which is collective. Throws CudaError when the heap has no room.
  void take_window(int64_t number, int64_t bytes);
  // (number, bytes) of windows that this process has given back. Numbers mean the same window in
  // all processes.
  static std::vector<std::pair<int64_t, int64_t>> given_back();

  PeerMemory own() const override { return {data_, control_}; }
  int64_t data_bytes() const override { return data_bytes_; }
  int64_t control_bytes() const override { return control_bytes_; }
  PeerMemory of_rank(int rank) const override;
  int pe(int rank) const override { return pes_[static_cast<size_t>(rank)]; }
  void store(int rank, char* own_word, uint32_t value, cudaStream_t stream) const override;
  void settle(cudaStream_t stream) const override;
  void give_back() override;
  void keep_for_ever() override { number_ = -1; }

 private:
  const int ordinal_;
  const std::vector<int> pes_;
  const bool only_puts_;
  int64_t number_ = -1;
  char* data_ = nullptr;
  int64_t data_bytes_ = 0;
  char* control_ = nullptr;
  int64_t control_bytes_ = 0;
};

}  // namespace jax_ep::gpu
