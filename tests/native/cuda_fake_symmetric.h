// Symmetric memory of one process of two, in host memory: what the host side of the CUDA backend
// asks of it, in order.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_rank.h"
#include "transport/cuda_symmetric.h"

namespace jax_ep::gpu {

class FakeSymmetric : public SymmetricMemory {
 public:
  // has_addresses: whether the other rank's memory can be addressed.
  FakeSymmetric(int rank, int64_t data_bytes, bool has_addresses)
      : rank_(rank),
        has_addresses_(has_addresses),
        data_(static_cast<size_t>(data_bytes), 'x'),
        control_(static_cast<size_t>(CudaRank::symmetric_control_bytes(2)), 'x') {}

  PeerMemory own() const override {
    return {const_cast<char*>(data_.data()), const_cast<char*>(control_.data())};
  }
  int64_t data_bytes() const override { return static_cast<int64_t>(data_.size()); }
  int64_t control_bytes() const override { return static_cast<int64_t>(control_.size()); }
  PeerMemory of_rank(int rank) const override {
    if (rank == rank_) return own();
    return has_addresses_ ? PeerMemory{far_, far_ + 1} : PeerMemory{nullptr, nullptr};
  }
  int pe(int rank) const override { return 10 + rank; }
  void store(int rank, char* own_word, uint32_t value, cudaStream_t) const override {
    asked.push_back("store to " + std::to_string(rank) + " value " + std::to_string(value) +
                    " at " + std::to_string(own_word - control_.data()));
  }
  void settle(cudaStream_t) const override { asked.push_back("settle"); }
  void give_back() override { asked.push_back("give back"); }
  void keep_for_ever() override { asked.push_back("keep"); }

  char* far() const { return far_; }
  mutable std::vector<std::string> asked;

 private:
  const int rank_;
  const bool has_addresses_;
  std::vector<char> data_;
  std::vector<char> control_;
  mutable char far_[2];
};

}  // namespace jax_ep::gpu
