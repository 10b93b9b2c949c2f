#include "cuda/cuda_buffer.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "transport/cuda_counters.h"

namespace jax_ep::gpu {

namespace {

// Far from the ids of CPU buffers, which count from 1 in a registry of their own.
constexpr int64_t kFirstId = (int64_t{1} << 32) + 1;
// For what was running to end by itself once it has passed its deadline.
constexpr std::chrono::seconds kGrace{5};

CudaSettings settings_of(const CudaBufferOptions& options) {
  const int num_ranks = static_cast<int>(options.device_ordinals.at(0).size());
  if (num_ranks > kMaxRanks) {
    throw std::invalid_argument("a group of " + std::to_string(num_ranks) +
                                " GPUs is too large; at most " + std::to_string(kMaxRanks) +
                                " form one");
  }
  const WindowLayout layout = WindowLayout::make(
      {num_ranks, options.tokens_per_epoch, options.num_experts, options.num_experts_per_tok,
       options.hidden * options.itemsize, options.staging,
       /*records=*/options.low_latency});
  return {num_ranks > 1 ? layout : without_payload(layout), options.max_tokens_per_rank,
          options.num_sms,
          std::chrono::duration_cast<std::chrono::nanoseconds>(
              std::chrono::duration<double>(options.timeout_s)),
          options.symmetric};
}

std::vector<std::unique_ptr<CudaGroup>> make_groups(const CudaBufferOptions& options,
                                                    const CudaSettings& settings) {
  std::vector<std::unique_ptr<CudaGroup>> groups;
  for (const std::vector<int>& ordinals : options.device_ordinals) {
    groups.push_back(std::make_unique<CudaGroup>(settings, ordinals));
  }
  return groups;
}

// Open buffers. Never destroyed: programs may ask for a buffer while the process ends.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  int64_t next_id() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_id_;
  }

  std::shared_ptr<CudaBuffer> create(std::optional<int64_t> agreed_id,
                                     const CudaBufferOptions& options) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t id = agreed_id.value_or(next_id_);
    if (id < next_id_) {
      throw std::invalid_argument("id " + std::to_string(id) +
                                  " has been given before; the next is " +
                                  std::to_string(next_id_));
    }
    next_id_ = id + 1;
    lock.unlock();  // handlers must find other buffers while this one takes its memory
    auto buffer = std::make_shared<CudaBuffer>(id, options);
    lock.lock();
    buffers_[id] = buffer;
    return buffer;
  }

  std::shared_ptr<CudaBuffer> find(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = buffers_.find(id);
    return it == buffers_.end() ? nullptr : it->second;
  }

  void remove(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    buffers_.erase(id);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<CudaBuffer>> buffers_;
  int64_t next_id_ = kFirstId;
};

}  // namespace

CudaBuffer::CudaBuffer(int64_t id, const CudaBufferOptions& options)
    : id_(id),
      options_(options),
      settings_(settings_of(options)),
      groups_(make_groups(options, settings_)),
      notices_(static_cast<int>(options.device_ordinals.size()), num_ranks(), options.num_experts,
               [&options](int group, int rank, int64_t num_words) {
                 const int ordinal = options.device_ordinals[group][rank];
                 return ordinal < 0 ? MappedCounters::none()
                                    : make_mapped_counters(ordinal, num_words);
               }) {
  for (size_t group = 0; group < options.device_ordinals.size(); ++group) {
    const std::vector<int>& ordinals = options.device_ordinals[group];
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      if (ordinals[rank] < 0) continue;
      places_[ordinals[rank]] = {static_cast<int>(group), static_cast<int>(rank)};
      ordinals_.push_back(ordinals[rank]);
    }
  }
}

std::optional<CudaBuffer::Place> CudaBuffer::find_device(int ordinal) const {
  const auto it = places_.find(ordinal);
  return it == places_.end() ? std::nullopt : std::optional<Place>(it->second);
}

bool CudaBuffer::is_shared() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->is_shared(); });
}

std::string CudaBuffer::offer() const {
  std::vector<MemoryOffer> offers;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (!groups_[i]->is_shared()) continue;
    for (const MemoryOffer& offer : groups_[i]->offers(static_cast<int>(i))) {
      offers.push_back(offer);
    }
  }
  return to_bytes(offers);
}

void CudaBuffer::join(const std::vector<std::string>& offers) {
  std::vector<std::vector<MemoryOffer>> of_group(groups_.size());
  for (const std::string& bytes : offers) {
    for (const MemoryOffer& offer : offers_from(bytes)) {
      of_group.at(static_cast<size_t>(offer.group)).push_back(offer);
    }
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i]->is_shared()) groups_[i]->connect(of_group[i]);
  }
}

void CudaBuffer::join_symmetric() {
  for (auto& group : groups_) {
    if (group->is_shared()) group->connect_symmetric();
  }
}

int CudaBuffer::num_sms() const {
  const Place& place = places_.at(ordinals_.at(0));
  return group(place.group).rank(place.rank).num_sms();
}

int64_t CudaBuffer::window_bytes() const {
  return num_ranks() > 1 ? settings_.layout.total_bytes() : 0;
}

void CudaBuffer::abort(OpKind op, const std::string& why) {
  if (num_ranks() == 1) return;
  for (auto& group : groups_) group->abort(op, why);
}

bool CudaBuffer::wait_idle() const {
  const auto limit = settings_.timeout + kGrace;
  if (!devices_idle(ordinals_, limit)) return false;
  if (settings_.symmetric == nullptr) return true;
  for (const auto& group : groups_) group->settle();
  return devices_idle(ordinals_, limit);
}

void CudaBuffer::require_idle() const {
  if (wait_idle()) return;
  throw std::runtime_error(
      "operations of this buffer are still running: block_until_ready on their results first");
}

void CudaBuffer::reset() {
  require_idle();
  for (auto& group : groups_) group->reset();
}

bool CudaBuffer::drain() const {
  try {
    return wait_idle();
  } catch (const CudaError&) {  // some kernel has failed, and its GPU answers nobody any more
    return false;
  }
}

void CudaBuffer::close(bool drained) {
  try {
    for (auto& group : groups_) group->shut();
  } catch (const CudaError&) {
    drained = false;
  }
  const bool idle = drained && drain();
  for (auto& group : groups_) idle ? group->free_memory() : group->abandon_memory();
}

int64_t next_cuda_buffer_id() { return Registry::instance().next_id(); }

std::shared_ptr<CudaBuffer> create_cuda_buffer(std::optional<int64_t> agreed_id,
                                               const CudaBufferOptions& options) {
  free_what_all_have_left();
  return Registry::instance().create(agreed_id, options);
}

std::shared_ptr<CudaBuffer> find_cuda_buffer(int64_t id) { return Registry::instance().find(id); }

void close_cuda_buffer(int64_t id) {
  const std::shared_ptr<CudaBuffer> buffer = find_cuda_buffer(id);
  if (buffer == nullptr) return;
  const bool drained = buffer->drain();
  Registry::instance().remove(id);
  buffer->close(drained);
}

}  // namespace jax_ep::gpu
