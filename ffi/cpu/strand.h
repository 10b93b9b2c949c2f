// Workers that carry out operations: one strand per (rank, channel), each running its tasks one at
// a time in the order of submission, on a pool of threads of which as many run as there are cores.
//
// XLA may run the rest of a program, blocking collectives included, inside the callback that tells
// it an operation is done. So a task returns that callback, and the strand is handed on before it
// is run, and a thread that does not come back from it makes room for another: a stuck program
// never keeps a rank from serving its peers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "cpu/admission.h"

namespace jax_ep {

using Completion = std::function<void()>;  // or null
using Task = std::function<Completion()>;

class Strand;

// Never destroyed: its threads may sit in XLA's callbacks when the process exits.
class StrandPool {
 public:
  // The process's.
  static StrandPool& instance();
  explicit StrandPool(int num_cores, std::chrono::microseconds watch_period = kWatchPeriod)
      : watch_period_(watch_period), admission_(num_cores) {}

  // Runs a completion that belongs to no task of the caller's.
  void post(Completion completion);

  // While it lives, the calling thread sleeps, and if it is a pool's, another runs in its place.
  class Asleep {
   public:
    Asleep();
    ~Asleep();
    Asleep(const Asleep&) = delete;
    Asleep& operator=(const Asleep&) = delete;
  };

 private:
  friend class Strand;
  using Clock = std::chrono::steady_clock;
  // What a thread of a pool knows of itself.
  struct Thread {
    StrandPool& pool;
    Admission::Turn turn;
  };
  static thread_local Thread* this_thread_;
  // How long all that runs may stay at what it does before more is let in.
  static constexpr std::chrono::microseconds kWatchPeriod{500};

  void submit(Strand* strand, Task task);
  bool idle(Strand* strand);

  // With mutex held:
  void queue(Strand* strand);
  void note_queued();
  void call_watcher();
  bool has_lookout() const;
  bool nothing_queued() const { return strands_.empty() && completions_.empty(); }
  std::optional<WorkKind> next_kind() const;
  void call_threads();
  Completion take(WorkKind kind, std::unique_lock<std::mutex>* lock);
  Completion run_next_task(Strand* strand, std::unique_lock<std::mutex>* lock);
  void rest(std::unique_lock<std::mutex>* lock);
  bool look_out(std::unique_lock<std::mutex>* lock);

  void run_thread();
  void watch();

  const std::chrono::microseconds watch_period_;
  std::mutex mutex_;
  Admission admission_;
  std::deque<Strand*> strands_;  // with tasks that wait for a thread
  std::deque<Completion> completions_;
  std::atomic<int> num_queued_{0};  // of both, for those without the mutex
  uint64_t num_taken_ = 0;          // from both, ever

  std::condition_variable call_;
  int num_idle_ = 0;      // threads that sleep and are not called
  int num_calls_ = 0;     // to sleeping threads that have not heard yet
  int num_coming_ = 0;    // threads called, or made, that have not looked for work yet
  bool lookout_ = false;  // one more has no work and is awake
  std::atomic<Clock::duration> looked_{};  // when it last did look, since the clock's epoch
  bool crowded_ = false;                   // more is queued than may begin

  std::condition_variable watch_;
  bool watcher_there_ = false;
  bool watching_ = false;  // false: the watcher sleeps until more is queued than may begin
};

class Strand {
 public:
  explicit Strand(StrandPool& pool = StrandPool::instance()) : pool_(pool) {}

  // Runs `task` after all earlier ones of this strand. Does not block.
  void submit(Task task) { pool_.submit(this, std::move(task)); }
  bool idle() { return pool_.idle(this); }

 private:
  friend class StrandPool;
  StrandPool& pool_;
  std::deque<Task> tasks_;  // guarded by the pool's mutex
  bool active_ = false;     // queued for a thread or running on one
};

}  // namespace jax_ep
