// The ranks of one group on the GPUs of this process.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_rank.h"

namespace jax_ep::gpu {

// Faults of topk_idx that one rank has met.
struct DataFaults {
  int rank;
  int64_t count;
  DataFault first;
};

class CudaGroup {
 public:
  // ordinals: of the rank's GPUs.
  CudaGroup(const CudaSettings& settings, const std::vector<int>& ordinals);

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  const CudaRank& rank(int rank) const { return *ranks_[rank]; }

  // Why no operation can start, if so: somebody has given up, and nobody has called reset().
  std::optional<std::string> refusal() const;
  // A rank cannot take part in an operation: the others stop waiting for it.
  void abort(OpKind op, const std::string& why);

  std::vector<std::pair<ErrorRecord, std::string>> error_records() const;
  // Sum of the faults since the last call, with the first fault of the lowest rank.
  std::optional<DataFaults> take_data_faults();
  uint64_t epochs(Channel channel) { return ranks_[0]->epochs(channel); }

  // The caller has waited for all operations to end.
  void reset();
  void shut();
  void free_memory();
  void abandon_memory();

 private:
  void open();
  double timeout_s() const;

  const CudaSettings settings_;
  std::vector<std::unique_ptr<CudaRank>> ranks_;
  mutable std::mutex mutex_;
  std::optional<std::pair<ErrorRecord, std::string>> aborted_;
};

}  // namespace jax_ep::gpu
