#include "cuda/cuda_buffer.h"

#include <map>
#include <mutex>
#include <stdexcept>

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
       options.hidden * options.itemsize, /*staging=*/false,
       /*records=*/options.low_latency});
  return {num_ranks > 1 ? layout : without_payload(layout), options.max_tokens_per_rank,
          options.num_sms,
          std::chrono::duration_cast<std::chrono::nanoseconds>(
              std::chrono::duration<double>(options.timeout_s))};
}

// Open buffers. Never destroyed: programs may ask for a buffer while the process ends.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  std::shared_ptr<CudaBuffer> create(const CudaBufferOptions& options) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t id = next_id_++;
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
    : id_(id), options_(options), settings_(settings_of(options)) {
  for (size_t group = 0; group < options.device_ordinals.size(); ++group) {
    const std::vector<int>& ordinals = options.device_ordinals[group];
    groups_.push_back(std::make_unique<CudaGroup>(settings_, ordinals));
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      places_[ordinals[rank]] = {static_cast<int>(group), static_cast<int>(rank)};
      ordinals_.push_back(ordinals[rank]);
    }
  }
}

std::optional<CudaBuffer::Place> CudaBuffer::find_device(int ordinal) const {
  const auto it = places_.find(ordinal);
  return it == places_.end() ? std::nullopt : std::optional<Place>(it->second);
}

int64_t CudaBuffer::window_bytes() const {
  return num_ranks() > 1 ? settings_.layout.total_bytes() : 0;
}

void CudaBuffer::abort(OpKind op, const std::string& why) {
  if (num_ranks() == 1) return;
  for (auto& group : groups_) group->abort(op, why);
}

bool CudaBuffer::wait_idle() const { return devices_idle(ordinals_, settings_.timeout + kGrace); }

void CudaBuffer::reset() {
  if (!wait_idle()) {
    throw std::runtime_error(
        "operations of this buffer are still running: block_until_ready on their results first");
  }
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

std::shared_ptr<CudaBuffer> create_cuda_buffer(const CudaBufferOptions& options) {
  return Registry::instance().create(options);
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
