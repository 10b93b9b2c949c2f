// What the process is doing, said when it is ended: a hang must tell where it was.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

namespace jax_ep::gpu::test {

class Progress {
 public:
  static Progress& instance() {
    static auto* progress = new Progress();
    return *progress;
  }

  void begin_case(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    case_ = name;
    case_began_ = Clock::now();
  }
  void step(const char* what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    step_ = what;
    step_began_ = Clock::now();
  }
  double seconds_of_case() const { return seconds_since(case_began_); }

  // Ends the process when it has not ended by itself.
  void limit_seconds(int seconds) {
    std::thread([this, seconds] {
      std::this_thread::sleep_for(std::chrono::seconds(seconds));
      const std::lock_guard<std::mutex> lock(mutex_);
      std::printf("\nTIME LIMIT of %d s in '%s' (for %.1f s), step '%s' (for %.1f s)\n", seconds,
                  case_.c_str(), seconds_since(case_began_), step_, seconds_since(step_began_));
      std::fflush(stdout);
      _exit(3);
    }).detach();
  }

 private:
  using Clock = std::chrono::steady_clock;

  static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  mutable std::mutex mutex_;
  std::string case_ = "the beginning";
  const char* step_ = "none";
  Clock::time_point case_began_ = Clock::now();
  Clock::time_point step_began_ = Clock::now();
};

inline void begin_case(const std::string& name) { Progress::instance().begin_case(name); }
inline void step(const char* what) { Progress::instance().step(what); }

}  // namespace jax_ep::gpu::test
