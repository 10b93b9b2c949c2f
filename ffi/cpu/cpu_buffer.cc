#include "cpu/cpu_buffer.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace jax_ep {

namespace {

using Clock = Group::Clock;

WindowLayout layout_of(const CpuBufferOptions& options) {
  const int num_ranks = static_cast<int>(options.device_ordinals.at(0).size());
  return WindowLayout::make({num_ranks, options.tokens_per_epoch, options.num_experts,
                             options.num_experts_per_tok, options.hidden * options.itemsize,
                             /*staging=*/false});
}

// Open buffers, and the thread that looks for operations some rank did not start in time. Never
// destroyed, as the pool of workers is not.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  std::shared_ptr<CpuBuffer> create(const CpuBufferOptions& options) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto buffer = std::make_shared<CpuBuffer>(next_id_, options);
    buffers_[next_id_++] = buffer;
    if (!watching_) {
      watching_ = true;
      std::thread([this] { watch(); }).detach();
    }
    return buffer;
  }

  std::shared_ptr<CpuBuffer> find(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = buffers_.find(id);
    return it == buffers_.end() ? nullptr : it->second;
  }

  std::shared_ptr<CpuBuffer> remove(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = buffers_.find(id);
    if (it == buffers_.end()) return nullptr;
    auto buffer = std::move(it->second);
    buffers_.erase(it);
    return buffer;
  }

 private:
  // A period is enough: deadlines are seconds away.
  void watch() {
    constexpr std::chrono::milliseconds kPeriod{50};
    for (;;) {
      std::this_thread::sleep_for(kPeriod);
      std::vector<std::shared_ptr<CpuBuffer>> open;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& entry : buffers_) open.push_back(entry.second);
      }
      for (const auto& buffer : open) {
        for (const auto& group : buffer->groups()) group->expire(Clock::now());
      }
    }
  }

  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<CpuBuffer>> buffers_;
  int64_t next_id_ = 1;
  bool watching_ = false;
};

}  // namespace

CpuBuffer::CpuBuffer(int64_t id, const CpuBufferOptions& options)
    : id_(id),
      options_(options),
      layout_(layout_of(options)),
      notices_(static_cast<int>(options.device_ordinals.size()), layout_.shape.num_ranks,
               options.num_experts,
               [](int, int, int64_t num_words) { return make_process_counters(num_words); }) {
  for (size_t group = 0; group < options.device_ordinals.size(); ++group) {
    groups_.push_back(std::make_unique<Group>(layout_, timeout(), options.payload));
    const std::vector<int>& ranks = options.device_ordinals[group];
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      places_[ranks[rank]] = {static_cast<int>(group), static_cast<int>(rank)};
    }
  }
}

std::chrono::nanoseconds CpuBuffer::timeout() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(options_.timeout_s));
}

std::optional<CpuBuffer::Place> CpuBuffer::find_device(int ordinal) const {
  const auto it = places_.find(ordinal);
  return it == places_.end() ? std::nullopt : std::optional<Place>(it->second);
}

int64_t CpuBuffer::window_bytes() const { return num_ranks() > 1 ? layout_.total_bytes() : 0; }

void CpuBuffer::reject(int64_t run_id, const std::string& error) {
  for (auto& group : groups_) group->reject(run_id, error);
}

void CpuBuffer::close() {
  for (auto& group : groups_) {
    group->drain(timeout());
    group->close("EpUsageError: buffer " + std::to_string(id_) +
                 " was closed while this operation was on its way: call block_until_ready on the "
                 "results before closing it.");
  }
}

void CpuBuffer::reset() {
  for (auto& group : groups_) {
    if (!group->drain(timeout())) {
      throw std::runtime_error(
          "operations of this buffer are still running: block_until_ready on their results first");
    }
  }
  for (auto& group : groups_) group->reset();
}

std::shared_ptr<CpuBuffer> create_cpu_buffer(const CpuBufferOptions& options) {
  return Registry::instance().create(options);
}

std::shared_ptr<CpuBuffer> find_cpu_buffer(int64_t id) { return Registry::instance().find(id); }

void close_cpu_buffer(int64_t id) {
  const std::shared_ptr<CpuBuffer> buffer = find_cpu_buffer(id);
  if (buffer == nullptr) return;
  buffer->close();
  Registry::instance().remove(id);
}

}  // namespace jax_ep
