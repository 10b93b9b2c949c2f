#include "cpu/strand.h"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <thread>
#include <utility>

namespace jax_ep {

namespace {

constexpr std::chrono::microseconds kLookout{50};
constexpr std::chrono::microseconds kBlink{5};
constexpr int kQuietPeriods = 100;  // after which the watcher sleeps

// Threads inherit from XLA's the habit of flushing subnormal numbers to zero. Our arithmetic is
// IEEE's, as it is on GPUs; what runs on the thread afterwards finds the habit again.
class IeeeArithmetic {
 public:
  IeeeArithmetic() {
    std::fegetenv(&inherited_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~IeeeArithmetic() { std::fesetenv(&inherited_); }
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
  std::fenv_t inherited_;
};

Completion run_task(const Task& task) {
  const IeeeArithmetic ieee;
  return task();
}

}  // namespace

thread_local StrandPool::Thread* StrandPool::this_thread_ = nullptr;

StrandPool& StrandPool::instance() {
  static auto* pool =
      new StrandPool(std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  return *pool;
}

StrandPool::Asleep::Asleep() {
  if (this_thread_ == nullptr) return;
  StrandPool& pool = this_thread_->pool;
  std::lock_guard<std::mutex> lock(pool.mutex_);
  pool.admission_.fall_asleep(this_thread_->turn);
  pool.call_threads();
}

// Goes on also where that makes one thread too many: the next to end its work takes no other.
StrandPool::Asleep::~Asleep() {
  if (this_thread_ == nullptr) return;
  StrandPool& pool = this_thread_->pool;
  std::lock_guard<std::mutex> lock(pool.mutex_);
  this_thread_->turn = pool.admission_.wake();
  pool.call_threads();
}

void StrandPool::submit(Strand* strand, Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  strand->tasks_.push_back(std::move(task));
  if (strand->active_) return;
  strand->active_ = true;
  queue(strand);
  call_threads();
}

void StrandPool::post(Completion completion) {
  std::lock_guard<std::mutex> lock(mutex_);
  completions_.push_back(std::move(completion));
  note_queued();
  call_threads();
}

bool StrandPool::idle(Strand* strand) {
  std::lock_guard<std::mutex> lock(mutex_);
  return !strand->active_;
}

void StrandPool::queue(Strand* strand) {
  strands_.push_back(strand);
  note_queued();
}

void StrandPool::note_queued() { num_queued_.fetch_add(1, std::memory_order_relaxed); }

// Tasks first: others wait for what they do.
std::optional<WorkKind> StrandPool::next_kind() const {
  if (!strands_.empty() && admission_.room(kTaskWork) > 0) return kTaskWork;
  if (!completions_.empty() && admission_.room(kCompletionWork) > 0) return kCompletionWork;
  return std::nullopt;
}

// Sees to it that what may begin finds threads.
void StrandPool::call_threads() {
  const auto startable = [](size_t num_queued, int room) {
    return std::clamp(room, 0, static_cast<int>(num_queued));
  };
  const int num_tasks = startable(strands_.size(), admission_.room(kTaskWork));
  const int num_completions =
      startable(completions_.size(), admission_.room(kCompletionWork) - num_tasks);
  const int num_startable = num_tasks + num_completions;
  crowded_ = num_startable < num_queued_.load(std::memory_order_relaxed);
  if (crowded_ && !watching_) call_watcher();
  int missing = num_startable - num_coming_;
  if (missing > 0 && has_lookout()) --missing;
  for (; missing > 0; --missing) {
    ++num_coming_;
    if (num_idle_ > 0) {
      --num_idle_;
      ++num_calls_;
      call_.notify_one();
    } else {
      std::thread([this] { run_thread(); }).detach();
    }
  }
}

void StrandPool::run_thread() {
  Thread self{*this, 0};
  this_thread_ = &self;
  std::unique_lock<std::mutex> lock(mutex_);
  --num_coming_;
  for (;;) {
    const std::optional<WorkKind> kind = next_kind();
    if (!kind) {
      rest(&lock);
      continue;
    }
    self.turn = admission_.begin(*kind);
    Completion completion = take(*kind, &lock);
    lock.unlock();
    if (completion != nullptr) completion();
    completion = nullptr;
    lock.lock();
    admission_.end(self.turn);
  }
}

Completion StrandPool::take(WorkKind kind, std::unique_lock<std::mutex>* lock) {
  ++num_taken_;
  num_queued_.fetch_sub(1, std::memory_order_relaxed);
  if (kind == kTaskWork) {
    Strand* strand = strands_.front();
    strands_.pop_front();
    call_threads();
    return run_next_task(strand, lock);
  }
  Completion completion = std::move(completions_.front());
  completions_.pop_front();
  call_threads();
  return completion;
}

// The strand is handed on before its completion can be run.
Completion StrandPool::run_next_task(Strand* strand, std::unique_lock<std::mutex>* lock) {
  Task task = std::move(strand->tasks_.front());
  strand->tasks_.pop_front();
  lock->unlock();
  Completion completion = run_task(task);
  task = nullptr;  // what the task holds is released outside the lock
  lock->lock();
  strand->active_ = !strand->tasks_.empty();
  if (!strand->active_) return completion;
  queue(strand);
  // Without a completion this thread looks for work next, itself.
  if (completion != nullptr) call_threads();
  return completion;
}

void StrandPool::call_watcher() {
  watching_ = true;
  if (watcher_there_) {
    watch_.notify_one();
  } else {
    watcher_there_ = true;
    std::thread([this] { watch(); }).detach();
  }
}

// One that has not looked for some time shares a core with a thread that works, perhaps ours. To
// wake another finds a core that is free.
bool StrandPool::has_lookout() const {
  const auto now = Clock::now().time_since_epoch();
  return lookout_ && now - looked_.load(std::memory_order_relaxed) < kBlink;
}

// Until there may be work for this thread.
void StrandPool::rest(std::unique_lock<std::mutex>* lock) {
  if (look_out(lock)) return;
  ++num_idle_;
  call_.wait(*lock, [this] { return num_calls_ > 0; });
  --num_calls_;
  --num_coming_;
}

// Operations come one after another: a thread that would sleep until the next one stays awake a
// little while, since to be woken takes longer than many operations. One at a time, where the work
// of the others leaves a core. True when something was queued.
bool StrandPool::look_out(std::unique_lock<std::mutex>* lock) {
  if (lookout_ || !nothing_queued() || !admission_.has_spare_core()) return false;
  lookout_ = true;
  auto now = Clock::now();
  looked_.store(now.time_since_epoch(), std::memory_order_relaxed);
  lock->unlock();
  const auto end = now + kLookout;
  while (num_queued_.load(std::memory_order_relaxed) == 0 && now < end) {
    std::this_thread::yield();
    now = Clock::now();
    looked_.store(now.time_since_epoch(), std::memory_order_relaxed);
  }
  lock->lock();
  lookout_ = false;
  return !nothing_queued();
}

// Threads that run cannot be told from threads that sleep in somebody else's code. Where nothing
// queued has been begun for a period, they are taken for asleep.
void StrandPool::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (int num_quiet = 0;;) {
    if (num_quiet == kQuietPeriods) {
      watching_ = false;
      watch_.wait(lock, [this] { return watching_; });
      num_quiet = 0;
    }
    const uint64_t num_taken = num_taken_;
    const bool crowded = crowded_;
    lock.unlock();
    std::this_thread::sleep_for(watch_period_);
    lock.lock();
    num_quiet = crowded || crowded_ ? 0 : num_quiet + 1;
    if (!crowded || !crowded_ || num_taken != num_taken_) continue;
    admission_.set_aside(
        {static_cast<int>(strands_.size()), static_cast<int>(completions_.size())});
    call_threads();
  }
}

}  // namespace jax_ep
