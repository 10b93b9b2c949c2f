// The pool of threads without Python: how many run, who makes room for whom, and that nothing
// hangs when programs block. Prints the first thing that is wrong and fails.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/admission.h"
#include "cpu/strand.h"

using namespace jax_ep;

#define EXPECT(...)                                                                  \
  do {                                                                               \
    if (!(__VA_ARGS__)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      std::_Exit(1);                                                                 \
    }                                                                                \
  } while (0)

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kNever = std::chrono::hours(1);  // a watcher that sees nothing
constexpr int kCores = 2;

// Pools live for ever, since their threads do, and so does what these look at.
StrandPool& make_pool(int num_cores, std::chrono::microseconds watch_period) {
  return *new StrandPool(num_cores, watch_period);
}

std::deque<Strand>& make_strands(StrandPool& pool, int num_strands) {
  auto& strands = *new std::deque<Strand>;
  for (int i = 0; i < num_strands; ++i) strands.emplace_back(pool);
  return strands;
}

// Opens when it has been counted down.
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}
  void count_down() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ == 0) opened_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [this] { return count_ <= 0; });
  }
  void arrive_and_wait() {
    count_down();
    wait();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  int count_;
};

// How many threads are in a piece of work at once, at the most.
class Crowd {
 public:
  void pass() {
    const int inside = ++inside_;
    int most = most_.load();
    while (inside > most && !most_.compare_exchange_weak(most, inside)) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --inside_;
  }
  int most() const { return most_.load(); }

 private:
  std::atomic<int> inside_{0};
  std::atomic<int> most_{0};
};

void wait_until_idle(std::deque<Strand>& strands) {
  while (!std::all_of(strands.begin(), strands.end(), [](Strand& s) { return s.idle(); })) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void check_admission() {
  Admission admission(kCores);
  const auto first = admission.begin(kTaskWork);
  const auto second = admission.begin(kCompletionWork);
  EXPECT(admission.room(kTaskWork) == 0 && admission.room(kCompletionWork) == 0);
  EXPECT(!admission.has_spare_core());
  admission.end(first);
  EXPECT(admission.room(kTaskWork) == 1 && admission.has_spare_core());
  admission.begin(kTaskWork);

  // Two run, six completions wait: eight is what a program like this takes.
  admission.set_aside({0, 6});
  EXPECT(admission.room(kTaskWork) == kCores);
  EXPECT(admission.room(kCompletionWork) == 8);
  admission.end(second);  // no longer counts
  EXPECT(admission.room(kTaskWork) == kCores);
  for (int i = 0; i < 6; ++i) admission.begin(kCompletionWork);
  EXPECT(admission.room(kCompletionWork) == 2);
  EXPECT(admission.room(kTaskWork) < 0);
}

void check_forgetting() {
  Admission admission(kCores);
  admission.set_aside({0, 8});
  EXPECT(admission.room(kCompletionWork) == 8);
  const auto begin_and_end = [&](WorkKind kind, int times) {
    for (int i = 0; i < times; ++i) admission.end(admission.begin(kind));
  };
  begin_and_end(kTaskWork, 100000);
  EXPECT(admission.room(kCompletionWork) == 8);
  begin_and_end(kCompletionWork, 100);
  EXPECT(admission.room(kCompletionWork) == 8);
  begin_and_end(kCompletionWork, 10000);
  EXPECT(admission.room(kCompletionWork) == kCores);
}

void check_limit() {
  StrandPool& pool = make_pool(kCores, kNever);
  std::deque<Strand>& strands = make_strands(pool, 16);
  Crowd crowd;
  Latch done(16 * 4 * 2);
  for (int i = 0; i < 16 * 4; ++i) {
    strands[i % 16].submit([&] {
      crowd.pass();
      return [&] {
        crowd.pass();
        done.count_down();
      };
    });
    pool.post([&] {
      crowd.pass();
      done.count_down();
    });
  }
  done.wait();
  EXPECT(crowd.most() == kCores);
}

// One core: whoever waits must let the one run that it waits for.
void check_sleepers_make_room() {
  std::deque<Strand>& strands = make_strands(make_pool(1, kNever), 4);
  for (int repeat = 0; repeat < 200; ++repeat) {
    Latch all(4);
    Latch ended(4);
    for (Strand& strand : strands) {
      strand.submit([&] {
        const StrandPool::Asleep asleep;
        all.arrive_and_wait();
        return Completion([&] { ended.count_down(); });
      });
    }
    ended.wait();
  }
  // None of them counts any more, and none counts twice.
  Crowd crowd;
  Latch done(16);
  for (int i = 0; i < 16; ++i) {
    strands[i % 4].submit([&] {
      crowd.pass();
      return Completion([&] { done.count_down(); });
    });
  }
  done.wait();
  EXPECT(crowd.most() == 1);
}

// As when a program goes on with a collective of all ranks in each rank's completion.
void check_blocked_completions(std::chrono::microseconds watch_period, bool posted) {
  constexpr int kRanks = 8;
  constexpr int kRounds = 10;
  StrandPool& pool = make_pool(kCores, watch_period);
  std::deque<Strand>& strands = make_strands(pool, kRanks);
  Clock::duration later{};
  for (int round = 0; round <= kRounds; ++round) {
    const auto begin = Clock::now();
    Latch collective(kRanks);
    Latch done(kRanks);
    const auto program = [&] {
      collective.arrive_and_wait();
      done.count_down();
    };
    for (Strand& strand : strands) {
      if (posted) {
        pool.post(program);
      } else {
        strand.submit([&] { return Completion(program); });
      }
    }
    done.wait();
    wait_until_idle(strands);
    if (round > 0) later += Clock::now() - begin;
  }
  // What it took is remembered: not every round waits for the watcher.
  if (watch_period >= std::chrono::milliseconds(100)) EXPECT(later < kRounds * watch_period / 2);
}

// A program that is stuck until its own rank has served a peer.
void check_stuck_programs_are_passed_by(std::chrono::microseconds watch_period) {
  constexpr int kRanks = 8;
  std::deque<Strand>& strands = make_strands(make_pool(kCores, watch_period), kRanks);
  for (int repeat = 0; repeat < 20; ++repeat) {
    Latch served(kRanks);
    Latch ended(kRanks);
    for (Strand& strand : strands) {
      strand.submit([&] {
        return [&] {
          served.wait();
          ended.count_down();
        };
      });
      strand.submit([&] {
        served.count_down();
        return Completion();
      });
    }
    ended.wait();
  }
}

void check_order() {
  constexpr int kStrands = 12;
  constexpr int kTasks = 500;
  StrandPool& pool = make_pool(kCores, std::chrono::microseconds(300));
  std::deque<Strand>& strands = make_strands(pool, kStrands);
  std::vector<int> next(kStrands, 0);  // each guarded by nothing but its strand
  Latch completions(kStrands * kTasks + kStrands);
  std::vector<std::thread> submitters;
  for (int first = 0; first < 3; ++first) {
    submitters.emplace_back([&, first] {
      for (int i = 0; i < kTasks; ++i) {
        for (int s = first; s < kStrands; s += 3) {
          strands[s].submit([&, s, i] {
            EXPECT(next[s]++ == i);
            return Completion([&] { completions.count_down(); });
          });
        }
      }
      for (int s = first; s < kStrands; s += 3) pool.post([&] { completions.count_down(); });
    });
  }
  for (std::thread& thread : submitters) thread.join();
  completions.wait();
  wait_until_idle(strands);
  for (int count : next) EXPECT(count == kTasks);
}

// Each completion is the only source of the next task, as in a program's chain of operations.
void check_chain() {
  StrandPool& pool = make_pool(kCores, kNever);
  std::deque<Strand>& strands = make_strands(pool, 8);
  Latch ended(8);
  std::function<void(int, int)> step = [&](int s, int left) {
    if (left == 0) return ended.count_down();
    strands[s].submit([&, s, left]() -> Completion {
      if (left % 3 == 0) {
        pool.post([&, s, left] { step(s, left - 1); });
        return nullptr;
      }
      return [&, s, left] { step(s, left - 1); };
    });
  };
  for (int s = 0; s < 8; ++s) step(s, 2000);
  ended.wait();
}

}  // namespace

// Argument: the seconds after which to take it for hanging.
int main(int argc, char** argv) {
  EXPECT(argc == 2);
  alarm(static_cast<unsigned>(std::atoi(argv[1])));
  check_admission();
  check_forgetting();
  check_limit();
  check_sleepers_make_room();
  for (bool posted : {false, true}) {
    check_blocked_completions(std::chrono::microseconds(300), posted);
    check_blocked_completions(std::chrono::milliseconds(100), posted);
  }
  check_stuck_programs_are_passed_by(std::chrono::microseconds(300));
  check_order();
  check_chain();
  std::fflush(stdout);
  std::_Exit(0);
}
