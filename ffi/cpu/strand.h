// Workers that carry out operations: one strand per (rank, channel), each running its tasks one at
// a time in the order of submission, on a pool of threads that grows with the strands that are
// busy.
//
// XLA may run the rest of a program, blocking collectives included, inside the callback that tells
// it an operation is done. So a task returns that callback, and the strand is handed on before it
// is run: a stuck program never keeps a rank from serving its peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jax_ep {

using Completion = std::function<void()>;  // or null
using Task = std::function<Completion()>;

class StrandPool;

class Strand {
 public:
  // Runs `task` after all earlier ones of this strand. Does not block.
  void submit(Task task);
  bool idle();

 private:
  friend class StrandPool;
  std::deque<Task> tasks_;  // guarded by the pool's mutex
  bool active_ = false;     // queued for a thread or running on one
};

// Process-wide and never destroyed: its threads may sit in XLA's callbacks when the process exits.
class StrandPool {
 public:
  static StrandPool& instance();

  // Runs a completion that belongs to no task of the caller's.
  void post(Completion completion);

 private:
  friend class Strand;

  struct Work {
    Strand* strand;  // with tasks that wait for a thread, or null:
    Completion completion;
  };

  void submit(Strand* strand, Task task);
  bool idle(Strand* strand);
  void look_out(std::unique_lock<std::mutex>* lock);
  void enqueue(Work work);   // and sees to a thread for it; mutex held
  void put_back(Work work);  // by a thread that looks for work next; mutex held
  Completion run_next_task(Strand* strand, std::unique_lock<std::mutex>* lock);
  void run_thread();

  std::mutex mutex_;
  std::condition_variable ready_changed_;
  std::deque<Work> ready_;
  std::atomic<int> num_ready_{0};  // its size, for the thread on the lookout
  int idle_threads_ = 0;           // that sleep
  int busy_threads_ = 0;           // that have work
  bool lookout_ = false;           // one more thread has no work and is awake
};

}  // namespace jax_ep
