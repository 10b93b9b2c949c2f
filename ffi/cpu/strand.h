// Workers that carry out operations: one strand per (rank, channel), each running its tasks one at
// a time in the order of submission, on a pool of threads that grows with the strands that are
// busy.
//
// XLA may run the rest of a program, blocking collectives included, inside the callback that tells
// it an operation is done. So a task returns that callback, and the strand is handed on before it
// is run: a stuck program never keeps a rank from serving its peers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jax_ep {

using Completion = std::function<void()>;
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

 private:
  friend class Strand;

  void submit(Strand* strand, Task task);
  bool idle(Strand* strand);
  void activate(Strand* strand);  // mutex held
  void run_thread();

  std::mutex mutex_;
  std::condition_variable ready_changed_;
  std::deque<Strand*> ready_;  // strands with tasks that wait for a thread
  int idle_threads_ = 0;
};

}  // namespace jax_ep
