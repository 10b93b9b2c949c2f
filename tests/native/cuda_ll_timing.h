// Device time of low-latency operations inside a captured graph of 50, the slowest rank.
#pragma once

#include "cuda_ll_checks.h"

namespace jax_ep::gpu::test {

// launch(r): one operation of rank r.
template <class Launch>
double ll_microseconds(LlWorld& ll, Launch launch) {
  constexpr int kOperations = 50;
  constexpr int kReplays = 12;
  constexpr int kRepeats = 3;
  World& world = ll.world();
  const int num_ranks = world.num_ranks();
  std::vector<cudaGraphExec_t> graphs(num_ranks);
  std::vector<cudaEvent_t> begin(num_ranks), end(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    world.use(r);
    cudaStream_t stream = world.rank(r).stream;
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    for (int i = 0; i < kOperations; ++i) launch(r);
    check(cudaStreamEndCapture(stream, &graph), "end capture");
    check(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
    check(cudaGraphUpload(graphs[r], stream), "upload");
    check(cudaGraphDestroy(graph), "destroy graph");
    check(cudaEventCreate(&begin[r]), "event");
    check(cudaEventCreate(&end[r]), "event");
  }
  const auto on_all = [&](auto body) {
    for (int r = 0; r < num_ranks; ++r) {
      world.use(r);
      check(body(r, world.rank(r).stream), "timing");
    }
  };
  const auto replay = [&](int r, cudaStream_t stream) {
    return cudaGraphLaunch(graphs[r], stream);
  };
  for (int i = 0; i < 2; ++i) on_all(replay);
  world.synchronise();
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    on_all([&](int r, cudaStream_t stream) { return cudaEventRecord(begin[r], stream); });
    for (int i = 0; i < kReplays; ++i) on_all(replay);
    on_all([&](int r, cudaStream_t stream) { return cudaEventRecord(end[r], stream); });
    world.synchronise();
    double slowest = 0;
    for (int r = 0; r < num_ranks; ++r) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin[r], end[r]), "elapsed");
      slowest = std::max(slowest, milliseconds * 1000.0 / (kReplays * kOperations));
    }
    times.push_back(slowest);
  }
  for (int r = 0; r < num_ranks; ++r) {
    check(cudaGraphExecDestroy(graphs[r]), "destroy");
    check(cudaEventDestroy(begin[r]), "event");
    check(cudaEventDestroy(end[r]), "event");
  }
  std::sort(times.begin(), times.end());
  return times[kRepeats / 2];
}

// One line of the table.
inline void time_ll_row(LlWorld& ll) {
  const auto show = [&](const char* what, int width, auto launch) {
    step(what);
    std::printf(" %*.2f", width, ll_microseconds(ll, launch));
    std::fflush(stdout);
  };
  const Array<char>* rows[2] = {&ll.world().rank(0).x, &ll.world().rank(1).x};
  const auto dispatch = [&](int r) { ll.dispatch(r, LlTurn::fused(), 0, *rows[r]); };
  show("timing dispatch", 9, dispatch);
  show("timing dispatch again", 9, dispatch);
  show("timing dispatch start and done", 11, [&](int r) {
    ll.dispatch(r, ll.start_dispatch(r, 0), 0, *rows[r]);
    ll.dispatch(r, ll.done_dispatch(r, 0), 0, *rows[r]);
  });
  show("timing combine", 9, [&](int r) { ll.combine(r, LlTurn::fused(), 0, true, false); });
  show("timing combine start and done", 11, [&](int r) {
    ll.combine(r, ll.start_combine(r, 0), 0, true, false);
    ll.combine(r, ll.done_combine(r, 0), 0, true, false);
  });
  std::printf("\n");
}

// Inputs and a place for everything; what experts give is poison, which takes as long to add up.
inline void prepare_ll_timing(LlWorld& ll) {
  World& world = ll.world();
  step("making inputs");
  make_inputs(world);
  world.set_capacity(ll.mode().padded ? ll.padded_capacity() : choose_capacity(world));
  ll.poison();
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    world.rank(r).y.poison();
  }
  world.synchronise();
}

// Two ranks with a GPU each, or both on one. As many blocks share a multiprocessor there as do with
// a GPU each, when the ranks have half as many tokens and multiprocessors; nothing crosses a link.
struct LlPlace {
  std::vector<int> devices;
  std::vector<int> num_sms;
  const char* name;
};

inline int64_t time_ll_shape(uint64_t seed, int num_tokens, const LlPlace& place) {
  struct Row {
    const char* name;
    LlMode mode;
  };
  const Row rows[] = {{"fp8 padded", {LlOutput::kValues, true}},
                      {"fp8 compact", {LlOutput::kValues, false}},
                      {"bf16 padded", {LlOutput::kRows, true}},
                      {"bf16 compact", {LlOutput::kRows, false}},
                      {"fp8 to bf16 padded", {LlOutput::kDequantized, true}}};
  int64_t wrong = 0;
  std::printf("T=%d H=7168 K=8 E=256, %s, us per operation in a graph of 50\n", num_tokens,
              place.name);
  std::printf("%-20s %5s %9s %9s %11s %9s %11s\n", "", "SMs", "dispatch", "again", "start+done",
              "combine", "start+done");
  for (const Row& row : rows) {
    Case c = ll_case("timing", 2, place.devices, num_tokens, 7168, 8, 256);
    c.zero_tail = false;
    begin_case(row.name + std::string(", T=") + std::to_string(num_tokens));
    LlWorld ll(c, row.mode, seed, 2.0);
    // Few tokens, or the oracle would take longer than all timings.
    if (num_tokens == 8) wrong += check_ll_round(ll, false, false, "timing shape");
    prepare_ll_timing(ll);
    ll.set_statistics(false);
    for (const int num_sms : place.num_sms) {
      ll.world().set_launch(num_sms, true);
      std::printf("%-20s %5d", row.name, num_sms);
      time_ll_row(ll);
    }
  }
  return wrong;
}

inline int64_t run_ll_timings(uint64_t seed, int num_devices) {
  const LlPlace two{{0, 1}, {132, 64}, "2 GPUs"};
  const LlPlace one{{0, 0}, {32}, "2 ranks on one GPU"};
  int64_t wrong = 0;
  if (num_devices < 2) {
    for (const int num_tokens : {64, 8}) wrong += time_ll_shape(seed++, num_tokens, one);
  } else {
    for (const int num_tokens : {128, 8, 1}) wrong += time_ll_shape(seed++, num_tokens, two);
  }
  return wrong;
}

}  // namespace jax_ep::gpu::test
