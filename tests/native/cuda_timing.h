// Device time of each operation: events around a run of launches, the slowest rank.
#pragma once

#include "cuda_notify.h"

namespace jax_ep::gpu::test {

template <class Launch>
double microseconds(World& world, Launch launch) {
  constexpr int kWarmUp = 3;
  constexpr int kRuns = 12;
  std::vector<cudaEvent_t> begin(world.num_ranks());
  std::vector<cudaEvent_t> end(world.num_ranks());
  const auto record = [&](std::vector<cudaEvent_t>& events) {
    for (int r = 0; r < world.num_ranks(); ++r) {
      world.use(r);
      check(cudaEventCreate(&events[r]), "event");
      check(cudaEventRecord(events[r], world.rank(r).stream), "record");
    }
  };
  for (int i = 0; i < kWarmUp * world.num_ranks(); ++i) launch(i % world.num_ranks());
  record(begin);
  for (int i = 0; i < kRuns * world.num_ranks(); ++i) launch(i % world.num_ranks());
  record(end);
  world.synchronise();
  double slowest = 0;
  for (int r = 0; r < world.num_ranks(); ++r) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin[r], end[r]), "elapsed");
    slowest = std::max(slowest, static_cast<double>(milliseconds) * 1000 / kRuns);
    check(cudaEventDestroy(begin[r]), "event");
    check(cudaEventDestroy(end[r]), "event");
  }
  return slowest;
}

inline int64_t time_shape(uint64_t seed, int num_tokens, const std::vector<int>& all_sms) {
  Case c{"timing", 2, {0, 1}, num_tokens, 7168, 8, 256};
  c.zero_tail = false;
  c.capacity = Capacity::kTight;
  c.num_sms = 64;
  World world(c, seed, 2.0);
  int64_t wrong = check_notify(world, false, "timing shape");
  wrong += check_round(world, false, "timing shape");
  std::printf(
      "T=%d H=7168 K=8 E=256 bf16, us (each twice)\n%5s %15s %15s %15s %15s %15s %15s %15s %15s "
      "%15s %15s %15s %15s\n",
      num_tokens, "SMs", "dispatch", "combine", "with scalars", "combine_grad", "unexpanded",
      "notify", "notify, routed", "float8 pairs", "float8 rows", "plain dispatch", "plain combine",
      "plain c_grad");
  for (int num_sms : all_sms) {
    std::printf("%5d", num_sms);
    const auto show = [&](auto launch) {
      const double first = microseconds(world, launch);
      std::printf(" %7.1f %7.1f", first, microseconds(world, launch));
    };
    for (const bool bulk : {true, false}) {
      world.set_launch(num_sms, bulk);
      show([&](int r) { world.dispatch(r); });
      show([&](int r) { world.combine(r, true, false); });
      if (bulk) show([&](int r) { world.combine(r, false, true); });
      show([&](int r) { world.combine_grad(r); });
      if (!bulk) continue;
      show([&](int r) { world.dispatch(r, false); });
      show([&](int r) { world.notify(r); });
      show([&](int r) {
        world.notify(r);
        world.dispatch(r, true, 0, true);
      });
      for (const bool pairs : {true, false}) {
        show([&](int r) { world.dispatch_float8(r, true, pairs, false); });
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return wrong;
}

inline int64_t run_timings(uint64_t seed, int num_devices) {
  if (num_devices < 2) throw std::runtime_error("timings need two GPUs");
  int64_t wrong = time_shape(seed, 4096, {24, 32, 48, 64, 132});
  wrong += time_shape(seed + 1, 1024, {24, 48, 64});
  wrong += time_shape(seed + 2, 32, {64});
  return wrong;
}

}  // namespace jax_ep::gpu::test
