#include "cpu/cpu_buffer.h"

#include <algorithm>
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

  int64_t next_id() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_id_;
  }

  std::shared_ptr<CpuBuffer> create(std::optional<int64_t> agreed_id,
                                    const CpuBufferOptions& options) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t id = agreed_id.value_or(next_id_);
    if (id < next_id_) throw std::runtime_error("buffer id " + std::to_string(id) + " is taken");
    auto buffer = std::make_shared<CpuBuffer>(id, options);
    buffers_[id] = buffer;
    next_id_ = id + 1;
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
        for (Group* group : buffer->groups_here()) group->expire(Clock::now());
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
               options.num_experts, [this](int group, int rank, int64_t num_words) {
                 return is_here(group, rank) ? make_process_counters(num_words)
                                             : MappedCounters::none();
               }) {
  if (!options.processes.empty()) share_memory();
  char* memory = segment_ == nullptr
                     ? nullptr
                     : segment_->data() +
                           align_up(HostProcesses::bytes(static_cast<int>(all_processes().size())),
                                    kBufferAlignment);
  for (size_t group = 0; group < options.device_ordinals.size(); ++group) {
    Membership membership = membership_of(group, &memory);
    const std::vector<int> ranks = membership.ranks_here(num_ranks());
    groups_.push_back(ranks.empty() ? nullptr
                                    : std::make_unique<Group>(layout_, timeout(), options.payload,
                                                              std::move(membership)));
    for (const int rank : ranks) {
      places_[options.device_ordinals[group][rank]] = {static_cast<int>(group), rank};
    }
  }
}

std::vector<int> CpuBuffer::all_processes() const {
  std::vector<int> all;
  for (const auto& group : options_.processes) all.insert(all.end(), group.begin(), group.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

namespace {

bool spans_processes(const std::vector<int>& process_of) {
  return std::any_of(process_of.begin(), process_of.end(),
                     [&](int process) { return process != process_of[0]; });
}

}  // namespace

// The table of processes, then the groups that span several, in order.
void CpuBuffer::share_memory() {
  const std::vector<int> all = all_processes();
  const auto num_shared =
      std::count_if(options_.processes.begin(), options_.processes.end(), spans_processes);
  const int64_t bytes =
      align_up(HostProcesses::bytes(static_cast<int>(all.size())), kBufferAlignment) +
      num_shared * Membership::bytes(layout_);
  segment_ = options_.segment_offer.empty() ? HostSegment::make(bytes)
                                            : HostSegment::open(options_.segment_offer, bytes);
  processes_ = std::make_unique<HostProcesses>(segment_->data(), all, options_.here);
  processes_->enter();
}

Membership CpuBuffer::membership_of(size_t group, char** memory) const {
  if (options_.processes.empty()) return {};
  Membership membership;
  membership.process_of = options_.processes[group];
  membership.here = options_.here;
  membership.processes = processes_.get();
  if (spans_processes(membership.process_of)) {
    membership.memory = *memory;
    *memory += Membership::bytes(layout_);
  }
  return membership;
}

std::vector<Group*> CpuBuffer::groups_here() const {
  std::vector<Group*> here;
  for (const auto& group : groups_) {
    if (group != nullptr) here.push_back(group.get());
  }
  return here;
}

std::string CpuBuffer::segment_offer() const {
  return segment_ == nullptr ? "" : segment_->offer();
}

void CpuBuffer::join() {
  if (segment_ == nullptr) return;
  segment_->withdraw();
  processes_->watch();
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

std::vector<std::string> CpuBuffer::absent_processes() const {
  std::vector<std::string> absent;
  for (const int process : all_processes()) {
    if (processes_->state(process) == HostProcesses::State::kThere) continue;
    absent.push_back(processes_->describe(process));
  }
  return absent;
}

void CpuBuffer::reject(int64_t run_id, const std::string& error) {
  for (Group* group : groups_here()) group->reject(run_id, error);
}

void CpuBuffer::close() {
  for (Group* group : groups_here()) {
    group->drain(timeout());
    group->close("EpUsageError: buffer " + std::to_string(id_) +
                 " was closed while this operation was on its way: call block_until_ready on the "
                 "results before closing it.");
  }
  if (processes_ != nullptr) processes_->leave();
}

void CpuBuffer::drain() {
  for (Group* group : groups_here()) {
    if (!group->drain(timeout())) {
      throw std::runtime_error(
          "operations of this buffer are still running: block_until_ready on their results first");
    }
  }
}

void CpuBuffer::reset() {
  for (Group* group : groups_here()) group->reset();
}

int64_t next_cpu_buffer_id() { return Registry::instance().next_id(); }

std::shared_ptr<CpuBuffer> create_cpu_buffer(std::optional<int64_t> agreed_id,
                                             const CpuBufferOptions& options) {
  return Registry::instance().create(agreed_id, options);
}

std::shared_ptr<CpuBuffer> find_cpu_buffer(int64_t id) { return Registry::instance().find(id); }

void close_cpu_buffer(int64_t id) {
  const std::shared_ptr<CpuBuffer> buffer = find_cpu_buffer(id);
  if (buffer == nullptr) return;
  buffer->close();
  Registry::instance().remove(id);
}

}  // namespace jax_ep
