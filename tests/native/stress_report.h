// What the drivers of protocol_stress share: where findings go, and how long things may take.
#pragma once

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "protocol/epochs.h"
#include "stress_world.h"

namespace jax_ep::stress {

constexpr std::chrono::seconds kTimeout{15};
constexpr int kJitterMicroseconds = 150;

class Failures {
 public:
  void add(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (count_++ < 5) std::printf("FAILED: %s\n", text.c_str());
  }
  bool any() {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_ > 0;
  }

 private:
  std::mutex mutex_;
  int count_ = 0;
};
inline Failures failures;

inline void note(const World& world, const char* what, int rank, int round,
                 const std::string& finding) {
  if (finding.empty()) return;
  failures.add(std::string(what) + " on rank " + std::to_string(rank) + ", round " +
               std::to_string(round) + " of " + world.describe() + ": " + finding);
}

inline void pause(Random& random) {
  if (chance(random, 50)) return;
  std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, 300)));
}

inline int epochs_of(const World& world, const Round& round) {
  return num_epochs(round.num_tokens, world.shape.tokens_per_epoch);
}

}  // namespace jax_ep::stress
