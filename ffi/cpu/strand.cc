#include "cpu/strand.h"

#include <cfenv>
#include <chrono>
#include <thread>
#include <utility>

namespace jax_ep {

namespace {

constexpr std::chrono::microseconds kLookout{50};

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

void Strand::submit(Task task) { StrandPool::instance().submit(this, std::move(task)); }
bool Strand::idle() { return StrandPool::instance().idle(this); }

StrandPool& StrandPool::instance() {
  static auto* pool = new StrandPool();
  return *pool;
}

void StrandPool::submit(Strand* strand, Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  strand->tasks_.push_back(std::move(task));
  if (strand->active_) return;
  strand->active_ = true;
  enqueue({strand, nullptr});
}

void StrandPool::post(Completion completion) {
  std::lock_guard<std::mutex> lock(mutex_);
  enqueue({nullptr, std::move(completion)});
}

bool StrandPool::idle(Strand* strand) {
  std::lock_guard<std::mutex> lock(mutex_);
  return !strand->active_;
}

void StrandPool::put_back(Work work) {
  ready_.push_back(std::move(work));
  num_ready_.fetch_add(1, std::memory_order_relaxed);
}

void StrandPool::enqueue(Work work) {
  put_back(std::move(work));
  const int num_sleepers_needed = static_cast<int>(ready_.size()) - (lookout_ ? 1 : 0);
  if (num_sleepers_needed <= 0) return;
  if (idle_threads_ >= num_sleepers_needed) {
    ready_changed_.notify_one();
  } else {
    std::thread([this] { run_thread(); }).detach();
  }
}

// Operations come one after another: a thread that would sleep until the next one stays awake a
// little while, since to be woken takes longer than many operations. One at a time, where the work
// of the others leaves a core.
void StrandPool::look_out(std::unique_lock<std::mutex>* lock) {
  static const int num_cores = static_cast<int>(std::thread::hardware_concurrency());
  if (lookout_ || busy_threads_ >= num_cores) return;
  lookout_ = true;
  lock->unlock();
  const auto end = std::chrono::steady_clock::now() + kLookout;
  while (num_ready_.load(std::memory_order_relaxed) == 0 &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  lock->lock();
  lookout_ = false;
}

void StrandPool::run_thread() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (ready_.empty()) look_out(&lock);
    while (ready_.empty()) {
      ++idle_threads_;
      ready_changed_.wait(lock);
      --idle_threads_;
    }
    Work work = std::move(ready_.front());
    ready_.pop_front();
    num_ready_.fetch_sub(1, std::memory_order_relaxed);
    ++busy_threads_;
    Completion completion =
        work.strand != nullptr ? run_next_task(work.strand, &lock) : std::move(work.completion);
    lock.unlock();
    if (completion != nullptr) completion();
    completion = nullptr;
    lock.lock();
    --busy_threads_;
  }
}

// The strand is handed on before its completion can be run.
Completion StrandPool::run_next_task(Strand* strand, std::unique_lock<std::mutex>* lock) {
  Task task = std::move(strand->tasks_.front());
  strand->tasks_.pop_front();
  lock->unlock();
  Completion completion = run_task(task);
  task = nullptr;  // what the task holds is released outside the lock
  lock->lock();
  if (strand->tasks_.empty()) {
    strand->active_ = false;
  } else if (completion == nullptr) {
    put_back({strand, nullptr});
  } else {
    enqueue({strand, nullptr});
  }
  return completion;
}

}  // namespace jax_ep
