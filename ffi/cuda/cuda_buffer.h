// The native side of a Buffer whose devices are GPUs of this process, and the registry that finds
// it by the id that compiled programs carry.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/cuda_group.h"
#include "transport/notice_board.h"

namespace jax_ep::gpu {

struct CudaBufferOptions {
  std::vector<std::vector<int>> device_ordinals;  // [group][rank], -1: another process's
  int num_experts;
  int num_experts_per_tok;
  int64_t hidden;
  int itemsize;
  int tokens_per_epoch;
  int max_tokens_per_rank;
  double timeout_s;
  int64_t fingerprint;
  int num_sms;  // 0: chosen for each GPU
  bool low_latency = false;
  bool staging = false;  // some peer is reached by puts
  std::shared_ptr<SymmetricMemory> symmetric = nullptr;
};

class CudaBuffer {
 public:
  struct Place {
    int group;
    int rank;
  };

  CudaBuffer(int64_t id, const CudaBufferOptions& options);

  int64_t id() const { return id_; }
  const CudaBufferOptions& options() const { return options_; }
  const WindowShape& shape() const { return settings_.layout.shape; }
  int num_ranks() const { return shape().num_ranks; }
  const CudaGroup& group(int group) const { return *groups_[group]; }
  const std::vector<std::unique_ptr<CudaGroup>>& groups() const { return groups_; }
  NoticeBoard& notices() { return notices_; }
  std::optional<Place> find_device(int ordinal) const;
  // Whether ranks live in other processes.
  bool is_shared() const;
  // What other processes need to map our memory, and what they have offered.
  std::string offer() const;
  void join(const std::vector<std::string>& offers);
  // The same where symmetric memory is shared.
  void join_symmetric();
  int num_sms() const;  // of the first GPU here
  int64_t window_bytes() const;

  // A device that takes part in a run cannot carry out its operation: nobody waits for it.
  void abort(OpKind op, const std::string& why);

  // All groups healthy again. Throws std::runtime_error when operations are still running.
  void reset();
  // Throws std::runtime_error when operations are still running.
  void require_idle() const;
  // Waits for what is running, at most about as long as a rank waits for a peer. False when
  // something still is.
  bool drain() const;
  // What starts from here on touches nothing, also in a graph that is replayed. Memory that
  // something may still use is kept instead of freed. drained: what drain() has said.
  void close(bool drained);

  // Launches by handlers, and how many of them went into a graph that XLA was capturing.
  std::atomic<uint64_t> num_launches{0};
  std::atomic<uint64_t> num_captures{0};
  // When a handler of notify last returned, by the steady clock: from there on counts are waited
  // for.
  std::atomic<int64_t> notify_returned_ns{0};

 private:
  bool wait_idle() const;

  const int64_t id_;
  const CudaBufferOptions options_;
  const CudaSettings settings_;
  std::vector<std::unique_ptr<CudaGroup>> groups_;
  NoticeBoard notices_;  // after the groups, which find out whether the devices are any
  std::unordered_map<int, Place> places_;
  std::vector<int> ordinals_;
};

// Ids are never given twice in a process, nor to a buffer of CPUs. At least this one is free.
int64_t next_cuda_buffer_id();
// agreed_id: at least next_cuda_buffer_id(), the same in all processes that share the buffer; none
// where they do not, and any new id will do. Throws std::invalid_argument otherwise.
std::shared_ptr<CudaBuffer> create_cuda_buffer(std::optional<int64_t> agreed_id,
                                               const CudaBufferOptions& options);
// Null when there is no such buffer, or none any more.
std::shared_ptr<CudaBuffer> find_cuda_buffer(int64_t id);
// Nothing new is accepted from here on; idempotent, never throws.
void close_cuda_buffer(int64_t id);

}  // namespace jax_ep::gpu
