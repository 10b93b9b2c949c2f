// Which process has which rank of a group, and what these processes share.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "layout/window_layout.h"
#include "protocol/error_record.h"
#include "transport/host_processes.h"
#include "transport/host_window.h"

namespace jax_ep {

// The record of the rank that gave up first, for the processes that have none of their own.
class FirstError {
 public:
  explicit FirstError(char* memory) : block_(reinterpret_cast<Block*>(memory)) {}

  // Keeps the first record only. Call before poisoning: who sees the poison sees the record.
  void publish(const ErrorRecord& record) {
    uint32_t empty = kEmpty;
    if (!block_->state.compare_exchange_strong(empty, kWriting)) return;
    std::memcpy(&block_->record, &record, sizeof(record));
    block_->state.store(kWritten, std::memory_order_release);
  }
  bool read(ErrorRecord* record) const {
    if (block_->state.load(std::memory_order_acquire) != kWritten) return false;
    std::memcpy(record, &block_->record, sizeof(*record));
    return true;
  }
  void clear() { block_->state.store(kEmpty, std::memory_order_release); }

  static constexpr int64_t kBytes = kBufferAlignment;

 private:
  static constexpr uint32_t kEmpty = 0, kWriting = 1, kWritten = 2;
  struct Block {
    std::atomic<uint32_t> state;
    ErrorRecord record;
  };
  static_assert(sizeof(Block) <= kBytes);
  Block* block_;
};

struct Membership {
  std::vector<int> process_of;  // by rank, JAX's process index; empty: one process has them all
  int here = 0;
  const HostProcesses* processes = nullptr;
  char* memory = nullptr;  // bytes(layout) of the segment

  static int64_t bytes(const WindowLayout& layout) {
    return FirstError::kBytes + HostWindows::shared_bytes(layout);
  }

  bool is_shared() const { return memory != nullptr; }
  bool is_here(int rank) const { return process_of.empty() || process_of[rank] == here; }
  std::vector<int> ranks_here(int num_ranks) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (is_here(rank)) ranks.push_back(rank);
    }
    return ranks;
  }
  char* windows() const { return is_shared() ? memory + FirstError::kBytes : nullptr; }
  FirstError first_error() const { return FirstError(memory); }
  bool has_left(int rank) const {
    return processes->state(process_of[rank]) != HostProcesses::State::kThere;
  }
  // "rank 3 is in process 1 (pid 4711)": for errors of ranks in several processes.
  std::string place_of(int rank) const {
    return "rank " + std::to_string(rank) + " is in " + processes->describe(process_of[rank]);
  }
};

}  // namespace jax_ep
