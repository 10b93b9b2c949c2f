#include "cuda/cuda_group.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

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

std::string describe_elsewhere(const ErrorRecord& record) {
  const std::string who =
      record.peer < 0 ? "another process" : "rank " + std::to_string(record.peer);
  return "EpTimeoutError: rank " + std::to_string(record.rank) + " stopped, because " + who +
         " has given up an operation of this buffer; what it waited for, the process of that rank "
         "says";
}

// Ranks of closed buffers whose windows other processes have mapped: CUDA forbids freeing them
// until those have unmapped them. Never destroyed.
class LeftBehind {
 public:
  static LeftBehind& instance() {
    static auto* left = new LeftBehind();
    return *left;
  }
  void add(std::unique_ptr<CudaRank> rank, const std::vector<int>& elsewhere) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranks_.push_back({std::move(rank), elsewhere});
  }
  void sweep() {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto freed = [](auto& left) {
      if (!left.rank->all_left(left.elsewhere)) return false;
      left.rank->free_memory();
      return true;
    };
    ranks_.erase(std::remove_if(ranks_.begin(), ranks_.end(), freed), ranks_.end());
  }

 private:
  struct Left {
    std::unique_ptr<CudaRank> rank;
    std::vector<int> elsewhere;  // ranks
  };
  std::mutex mutex_;
  std::vector<Left> ranks_;
};

}  // namespace

void free_what_all_have_left() { LeftBehind::instance().sweep(); }

CudaGroup::CudaGroup(const CudaSettings& settings, const std::vector<int>& ordinals)
    : settings_(settings), mapped_(ordinals.size()) {
  std::vector<int> here;
  std::copy_if(ordinals.begin(), ordinals.end(), std::back_inserter(here),
               [](int ordinal) { return ordinal >= 0; });
  require_peer_access(here);
  for (size_t r = 0; r < ordinals.size(); ++r) {
    ranks_.push_back(ordinals[r] < 0
                         ? nullptr
                         : std::make_unique<CudaRank>(ordinals[r], static_cast<int>(r), settings));
  }
  if (!is_shared()) connect({});
}

bool CudaGroup::is_shared() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return !rank; });
}

std::vector<CudaRank*> CudaGroup::ranks_here() const {
  std::vector<CudaRank*> here;
  for (const auto& rank : ranks_) {
    if (rank != nullptr) here.push_back(rank.get());
  }
  return here;
}

std::vector<MemoryOffer> CudaGroup::offers(int index) const {
  std::vector<MemoryOffer> offers;
  for (const CudaRank* rank : ranks_here()) {
    offers.push_back(offer_memory(index, rank->rank(), rank->ordinal(), rank->memory()));
  }
  return offers;
}

void CudaGroup::connect(const std::vector<MemoryOffer>& offers) {
  for (CudaRank* rank : ranks_here()) {
    std::vector<PeerMemory> memory(ranks_.size());
    for (const CudaRank* other : ranks_here()) memory[other->rank()] = other->memory();
    std::vector<MappedMemory>& mapped = mapped_[rank->rank()];
    for (const MemoryOffer& offer : offers) {
      if (offer.rank < 0 || offer.rank >= num_ranks() || ranks_[offer.rank] != nullptr) continue;
      mapped.emplace_back(rank->ordinal(), offer);
      memory[offer.rank] = mapped.back().memory();
    }
    for (int r = 0; r < num_ranks(); ++r) {
      if (memory[r].control != nullptr) continue;
      throw std::invalid_argument("no process has offered the memory of rank " + std::to_string(r) +
                                  ": make the buffer of the same mesh in all of them");
    }
    rank->open(memory);
  }
}

void CudaGroup::connect_symmetric() {
  for (CudaRank* rank : ranks_here()) {
    std::vector<PeerMemory> memory;
    for (int r = 0; r < num_ranks(); ++r) {
      memory.push_back(r == rank->rank() ? rank->memory() : settings_.symmetric->of_rank(r));
    }
    rank->open(memory);
  }
}

double CudaGroup::timeout_s() const {
  return std::chrono::duration<double>(settings_.timeout).count();
}

std::optional<std::string> CudaGroup::refusal() const {
  const std::vector<CudaRank*> here = ranks_here();
  const bool filed = std::any_of(here.begin(), here.end(), [](const CudaRank* rank) {
    return filed_error(rank->mailbox()) || load_acquire(rank->mailbox().poison) != 0;
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
  for (CudaRank* rank : ranks_here()) {
    rank->poison(rank->memory().control);
    for (const MappedMemory& other : mapped_[rank->rank()]) rank->poison(other.memory().control);
    if (settings_.symmetric == nullptr) continue;
    for (int r = 0; r < num_ranks(); ++r) {
      if (ranks_[r] == nullptr) rank->poison_rank(r);
    }
  }
}

std::vector<std::pair<ErrorRecord, std::string>> CudaGroup::error_records() const {
  std::vector<ErrorRecord> filed;
  for (const CudaRank* rank : ranks_here()) {
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
  if (records.empty()) {
    if (const auto record = error_elsewhere()) {
      records.emplace_back(*record, describe_elsewhere(*record));
    }
  }
  return records;
}

std::optional<ErrorRecord> CudaGroup::error_elsewhere() const {
  for (const CudaRank* rank : ranks_here()) {
    const uint32_t poison = load_acquire(rank->mailbox().poison);
    if (poison == 0) continue;
    const int peer = poison <= ranks_.size() ? static_cast<int>(poison) - 1 : -1;
    return ErrorRecord{
        ErrorKind::kTimeout, OpKind::kDispatch, WaitFor::kStart, rank->rank(), peer, 0, 0, 0};
  }
  return std::nullopt;
}

uint64_t CudaGroup::epochs(Channel channel) {
  const std::vector<CudaRank*> here = ranks_here();
  return here.empty() ? 0 : here[0]->epochs(channel);
}

std::optional<DataFaults> CudaGroup::take_data_faults() {
  std::optional<DataFaults> faults;
  for (const CudaRank* rank : ranks_here()) {
    Mailbox& mailbox = rank->mailbox();
    // The kernel writes the first fault before it counts it.
    const uint64_t found = load_acquire(mailbox.faults_found);
    const auto count = static_cast<int64_t>(found - mailbox.faults_taken);
    if (count == 0) continue;
    if (!faults)
      faults = DataFaults{rank->rank(), 0, unpack_fault(load_acquire(mailbox.first_fault))};
    faults->count += count;
    __atomic_store(&mailbox.faults_taken, &found, __ATOMIC_RELEASE);
  }
  return faults;
}

std::vector<int> CudaGroup::ranks_gone() const {
  const std::vector<CudaRank*> here = ranks_here();
  std::vector<int> gone;
  for (int r = 0; !here.empty() && r < num_ranks(); ++r) {
    if (ranks_[r] == nullptr && here[0]->all_left({r})) gone.push_back(r);
  }
  return gone;
}

void CudaGroup::settle() {
  for (CudaRank* rank : ranks_here()) rank->settle();
}

void CudaGroup::reset() {
  for (CudaRank* rank : ranks_here()) rank->clear();
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_.reset();
}

void CudaGroup::shut() {
  for (CudaRank* rank : ranks_here()) rank->shut();
}

void CudaGroup::free_memory() {
  std::vector<int> elsewhere;
  for (int r = 0; r < num_ranks(); ++r) {
    if (ranks_[r] == nullptr) elsewhere.push_back(r);
  }
  for (CudaRank* rank : ranks_here()) {
    std::vector<MappedMemory>& mapped = mapped_[rank->rank()];
    for (const MappedMemory& other : mapped) rank->leave(other.memory().control);
    mapped.clear();
    if (settings_.symmetric != nullptr) {
      for (int r : elsewhere) rank->leave_rank(r);
    }
    if (elsewhere.empty() || settings_.symmetric != nullptr) rank->free_memory();
  }
  if (elsewhere.empty() || settings_.symmetric != nullptr) return;
  for (auto& rank : ranks_) {
    if (rank != nullptr) LeftBehind::instance().add(std::move(rank), elsewhere);
  }
}

void CudaGroup::abandon_memory() {
  for (CudaRank* rank : ranks_here()) {
    for (MappedMemory& other : mapped_[rank->rank()]) other.keep_for_ever();
    rank->abandon_memory();
  }
}

}  // namespace jax_ep::gpu
