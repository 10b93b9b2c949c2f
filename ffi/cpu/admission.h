// Which of the pool's queued work may begin: on few cores, more threads than cores do the same work
// and are woken and switched besides.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_ep {

// Tasks are ours, and tell when they sleep. Completions run programs, which sleep as they like.
enum WorkKind { kTaskWork, kCompletionWork, kNumWorkKinds };

// Threads that run, against a limit: the number of cores and, for each kind of work, as many more
// as it took when everything had come to a stop. The latter is forgotten, halved each time, as work
// of the kind goes on without. Guarded by the pool's mutex.
class Admission {
 public:
  // In which count of running threads one is.
  using Turn = uint64_t;

  explicit Admission(int num_cores) : num_cores_(num_cores) {}

  // Whether there is a core for a thread without work: those that sleep may wake at any moment.
  bool has_spare_core() const { return num_running_ + num_asleep_ < num_cores_; }
  // How many threads may begin work of this kind.
  int room(WorkKind kind) const { return num_cores_ + extra_[kind] - num_running_; }

  Turn begin(WorkKind kind) {
    if (extra_[kind] > 0 && ++num_begun_[kind] >= kCalm) {
      extra_[kind] /= 2;
      num_begun_[kind] = 0;
    }
    return enter();
  }
  void end(Turn turn) {
    if (turn == turn_) --num_running_;
  }
  // In the middle of its work.
  void fall_asleep(Turn turn) {
    end(turn);
    ++num_asleep_;
  }
  Turn wake() {
    --num_asleep_;
    return enter();
  }

  // The threads that run have been at the same work while this much was queued. They no longer
  // count, and all that is queued may begin, now and as long as that is remembered.
  void set_aside(const int (&num_queued)[kNumWorkKinds]) {
    for (int kind = 0; kind < kNumWorkKinds; ++kind) {
      if (num_queued[kind] == 0) continue;
      extra_[kind] = std::max(extra_[kind], num_running_ + num_queued[kind] - num_cores_);
      num_begun_[kind] = 0;
    }
    num_running_ = 0;
    ++turn_;
  }

 private:
  static constexpr int kCalm = 1024;

  Turn enter() {
    ++num_running_;
    return turn_;
  }

  const int num_cores_;
  int num_running_ = 0;
  int num_asleep_ = 0;
  int extra_[kNumWorkKinds] = {};
  int num_begun_[kNumWorkKinds] = {};
  Turn turn_ = 0;
};

}  // namespace jax_ep
