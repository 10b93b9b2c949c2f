#include "cuda/cuda_group.h"

#include <algorithm>

#include "protocol/error_text.h"

namespace jax_ep::gpu {

namespace {

// Mailboxes are written by GPUs while the host looks.
template <class T>
T load_acquire(const T& word) {
  T value;
  __atomic_load(&word, &value, __ATOMIC_ACQUIRE);
  return value;
}

// The kernel writes the kind last.
std::optional<ErrorRecord> filed_error(const Mailbox& mailbox) {
  if (load_acquire(mailbox.error.kind) == ErrorKind::kNone) return std::nullopt;
  return mailbox.error;
}

}  // namespace

CudaGroup::CudaGroup(const CudaSettings& settings, const std::vector<int>& ordinals)
    : settings_(settings) {
  require_peer_access(ordinals);
  for (size_t rank = 0; rank < ordinals.size(); ++rank) {
    ranks_.push_back(std::make_unique<CudaRank>(ordinals[rank], static_cast<int>(rank), settings));
  }
  open();
}

void CudaGroup::open() {
  std::vector<PeerMemory> memory;
  for (const auto& rank : ranks_) memory.push_back(rank->memory());
  for (const auto& rank : ranks_) rank->open(memory);
}

double CudaGroup::timeout_s() const {
  return std::chrono::duration<double>(settings_.timeout).count();
}

std::optional<std::string> CudaGroup::refusal() const {
  const bool filed = std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
    return filed_error(rank->mailbox()).has_value();
  });
  if (filed) return error_records().front().second;
  std::lock_guard<std::mutex> lock(mutex_);
  return aborted_ ? std::optional<std::string>(aborted_->second) : std::nullopt;
}

void CudaGroup::abort(OpKind op, const std::string& why) {
  if (refusal()) return;  // all waiting has ended already
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return;
    aborted_.emplace(ErrorRecord{ErrorKind::kMismatch, op, WaitFor::kStart, -1, -1, 0, 0, 0}, why);
  }
  for (const auto& rank : ranks_) rank->poison();
}

std::vector<std::pair<ErrorRecord, std::string>> CudaGroup::error_records() const {
  std::vector<ErrorRecord> filed;
  for (const auto& rank : ranks_) {
    if (const auto record = filed_error(rank->mailbox())) filed.push_back(*record);
  }
  // What is no timeout is a cause; timeouts of others may be its consequence.
  std::stable_partition(filed.begin(), filed.end(), [](const ErrorRecord& record) {
    return record.kind != ErrorKind::kTimeout;
  });
  std::vector<std::pair<ErrorRecord, std::string>> records;
  for (const ErrorRecord& record : filed)
    records.emplace_back(record, describe(record, timeout_s()));
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) records.push_back(*aborted_);
  return records;
}

std::optional<DataFaults> CudaGroup::take_data_faults() {
  std::optional<DataFaults> faults;
  for (int r = 0; r < num_ranks(); ++r) {
    Mailbox& mailbox = ranks_[r]->mailbox();
    // The kernel writes the first fault before it counts it.
    const uint64_t found = load_acquire(mailbox.faults_found);
    const auto count = static_cast<int64_t>(found - mailbox.faults_taken);
    if (count == 0) continue;
    if (!faults) faults = DataFaults{r, 0, unpack_fault(load_acquire(mailbox.first_fault))};
    faults->count += count;
    __atomic_store(&mailbox.faults_taken, &found, __ATOMIC_RELEASE);
  }
  return faults;
}

void CudaGroup::reset() {
  for (const auto& rank : ranks_) rank->clear();
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_.reset();
}

void CudaGroup::shut() {
  for (const auto& rank : ranks_) rank->shut();
}

void CudaGroup::free_memory() {
  for (const auto& rank : ranks_) rank->free_memory();
}

void CudaGroup::abandon_memory() {
  for (const auto& rank : ranks_) rank->abandon_memory();
}

}  // namespace jax_ep::gpu
