// The ranks of one group on the GPUs of this process, and what other processes have mapped for us.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_rank.h"
#include "transport/cuda_ipc.h"

namespace jax_ep::gpu {

// Faults of topk_idx that one rank has met.
struct DataFaults {
  int rank;
  int64_t count;
  DataFault first;
};

class CudaGroup {
 public:
  // ordinals: of the ranks' GPUs, -1 for ranks of other processes. Where there are such, operations
  // may run after connect().
  CudaGroup(const CudaSettings& settings, const std::vector<int>& ordinals);

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  // Of this process.
  const CudaRank& rank(int rank) const { return *ranks_[rank]; }
  // Whether ranks live in other processes.
  bool is_shared() const;

  // What other processes need to map our ranks' memory. index: of this group in its buffer.
  std::vector<MemoryOffer> offers(int index) const;
  // offers: of this group, of all other processes.
  void connect(const std::vector<MemoryOffer>& offers);
  // The same where symmetric memory is shared.
  void connect_symmetric();

  // Why no operation can start, if so: somebody has given up, and nobody has called reset().
  std::optional<std::string> refusal() const;
  // A rank cannot take part in an operation: the others stop waiting for it.
  void abort(OpKind op, const std::string& why);

  std::vector<std::pair<ErrorRecord, std::string>> error_records() const;
  // Sum of the faults since the last call, with the first fault of the lowest rank.
  std::optional<DataFaults> take_data_faults();
  // 0 where this process has no rank of the group.
  uint64_t epochs(Channel channel);

  // Ranks of other processes that have closed the buffer.
  std::vector<int> ranks_gone() const;

  // What ranks here have put arrives, before the devices are idle again.
  void settle();
  // The caller has waited for all operations to end.
  void reset();
  void shut();
  void free_memory();
  void abandon_memory();

 private:
  std::optional<ErrorRecord> error_elsewhere() const;
  std::vector<CudaRank*> ranks_here() const;
  double timeout_s() const;

  const CudaSettings settings_;
  std::vector<std::unique_ptr<CudaRank>> ranks_;   // null: of another process
  std::vector<std::vector<MappedMemory>> mapped_;  // for each rank of ours, the others' memory
  mutable std::mutex mutex_;
  std::optional<std::pair<ErrorRecord, std::string>> aborted_;
};

// Frees the windows of closed buffers that no other process has mapped any more.
void free_what_all_have_left();

}  // namespace jax_ep::gpu
