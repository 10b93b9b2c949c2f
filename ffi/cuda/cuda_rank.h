// One rank of a group: its GPU, its window and scratch there, and what its kernels report.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/scratch.h"
#include "cuda/window.h"
#include "transport/cuda_window.h"

namespace jax_ep::gpu {

// What all ranks of a buffer share.
struct CudaSettings {
  WindowLayout layout;
  int max_tokens_per_rank;
  int num_sms;  // 0: chosen for each GPU
  std::chrono::nanoseconds timeout;
  std::shared_ptr<SymmetricMemory> symmetric = nullptr;  // of this process's one rank, or null
};

// Multiprocessors that an operation may take: about half, in steps of 8, so that matmuls and XLA's
// own collectives run beside it (64 of an H200's 132).
int default_num_sms(int device_sms);
// Kernels of ours spin until their peers come. XLA's collectives (NCCL takes up to 32 blocks) must
// find room beside them on every GPU, or two ranks could wait for each other in different order.
int most_num_sms(int device_sms);

class CudaRank {
 public:
  // Loads every kernel on the GPU: one loaded later, while a peer spins, could wait for that peer.
  // Throws std::invalid_argument for what a setting or another GPU mends, CudaError otherwise.
  CudaRank(int ordinal, int rank, const CudaSettings& settings);

  int ordinal() const { return ordinal_; }
  int rank() const { return rank_; }
  int num_sms() const { return num_sms_; }
  const DeviceLimits& limits() const { return limits_; }
  PeerMemory memory() const { return window_.memory(); }
  Mailbox& mailbox() const { return *mailbox_.host(); }

  // `peers`: of all ranks. From here on operations may run.
  void open(const std::vector<PeerMemory>& peers);
  // Bytes of symmetric memory that a rank's control block takes.
  static int64_t symmetric_control_bytes(int num_ranks);
  // Operations that start from now on touch nothing.
  void shut();
  // Back to the state at creation. No operation may be running.
  void clear();
  // Stops all waiting of the operations of the rank whose control block it is: ours, or another
  // process's.
  void poison(char* control);
  // The same for a rank that symmetric memory reaches.
  void poison_rank(int rank);
  // All that this rank has put has arrived.
  void settle();
  // After shut(), once no operation is running any more.
  void free_memory();
  // Of ranks in several processes: tells the rank whose control block it is that we use nothing of
  // it any more; and whether all of `ranks` have told us so.
  void leave(char* control);
  void leave_rank(int rank);
  bool all_left(const std::vector<int>& ranks);
  // After shut(), when that could not be waited for.
  void abandon_memory();

  uint64_t epochs(Channel channel);
  Operation operation(const OpTag& tag, Channel channel, const int32_t* rank_operand) const;

 private:
  struct Lasting {
    PeerTable peers;
    RankState state;
    uint32_t left[kMaxRanks];  // 1: that rank's process has unmapped our memory
  };
  // Low latency: what payload must hold between operations.
  void fill_payload();
  Lasting* lasting() const { return reinterpret_cast<Lasting*>(window_.lasting()); }

  const int ordinal_;
  const int rank_;
  const CudaSettings settings_;
  DeviceLimits limits_{};
  int num_sms_ = 0;
  uint32_t generation_ = 0;
  ScratchLayout scratch_layout_{};
  CudaWindow window_;
  DeviceMemory scratch_;
  MappedHost<Mailbox> mailbox_;
  std::unique_ptr<SideStream> side_;
};

}  // namespace jax_ep::gpu
