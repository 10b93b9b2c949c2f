// Ranks that never start, start late, run another operation, or are closed; captured graphs.
#pragma once

#include "cuda_checks.h"

namespace jax_ep::gpu::test {

inline bool is_nan_row(const char* row, const World& world) {
  return std::isnan(read_element(row, 0, world.c().type));
}

// Every output of a dispatch on this rank is what an aborted operation leaves.
inline void check_spoiled(World& world, int r, Verdict& verdict) {
  world.use(r);
  RankData& d = world.rank(r);
  for (int size : d.group_sizes.take()) verdict.expect(size == 0, "group_sizes spoiled", r);
  for (int row : d.recv_rows.take()) verdict.expect(row == -1, "recv_rows spoiled", r);
  for (int expert : d.sanitised.take()) verdict.expect(expert == -1, "topk_idx spoiled", r);
  for (float weight : d.weights.take()) verdict.expect(std::isnan(weight), "weights spoiled", r);
  const std::vector<char> tokens = d.tokens.take();
  for (int64_t row = 0; row < world.capacity(); ++row) {
    verdict.expect(is_nan_row(tokens.data() + row * world.row_bytes(), world), "tokens spoiled",
                   row);
  }
}

inline void print_records(World& world) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    const ErrorRecord& e = world.rank(r).rank->mailbox().error;
    std::printf("  rank %d: kind %d op %d wait %d peer %d epoch %llu expected %llx seen %llx\n", r,
                static_cast<int>(e.kind), static_cast<int>(e.op), static_cast<int>(e.wait), e.peer,
                static_cast<unsigned long long>(e.epoch),
                static_cast<unsigned long long>(e.expected),
                static_cast<unsigned long long>(e.seen));
  }
}

inline void prepare(World& world) {
  make_inputs(world);
  world.set_capacity(choose_capacity(world));
  world.poison();
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The last rank never starts: the others name it, and every later operation returns at once.
inline void check_missing_rank(World& world, Verdict& verdict) {
  const int missing = world.num_ranks() - 1;
  prepare(world);
  auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < missing; ++r) world.dispatch(r);
  world.synchronise();
  const double waited = seconds_since(start);
  bool named = false;
  for (int r = 0; r < missing; ++r) {
    const ErrorRecord& record = world.rank(r).rank->mailbox().error;
    if (record.kind == ErrorKind::kTimeout) {
      named = true;
      verdict.expect(record.peer == missing && record.rank == r, "who is late", record.peer);
      verdict.expect(record.op == OpKind::kDispatch && record.wait == WaitFor::kTag, "what is late",
                     static_cast<int>(record.wait));
    }
    check_spoiled(world, r, verdict);
  }
  verdict.expect(named, "a timeout is recorded", 0);
  world.poison();
  start = std::chrono::steady_clock::now();
  for (int r = 0; r < world.num_ranks(); ++r) world.dispatch(r);
  world.synchronise();
  const double later = seconds_since(start);
  for (int r = 0; r < world.num_ranks(); ++r) check_spoiled(world, r, verdict);
  verdict.expect(waited > 0.15 && waited < 1.0 && later < 0.1, "deadlines hold", 0);
  std::printf("  missing rank: gave up after %.2f s, next operation took %.4f s\n", waited, later);
}

// A rank that comes late, but in time.
inline void check_straggler(World& world, Verdict& verdict) {
  prepare(world);
  const Truth truth = make_truth(world, world.capacity());
  for (int r = 1; r < world.num_ranks(); ++r) world.dispatch(r);
  usleep(100000);
  world.dispatch(0);
  world.synchronise();
  check_dispatch(world, truth, verdict);
}

// A rank of another call site, and one whose program calls itself another rank.
inline void check_mismatches(World& world, Verdict& verdict) {
  const auto count = [&](WaitFor wait) {
    int records = 0;
    for (int r = 0; r < world.num_ranks(); ++r) {
      const ErrorRecord& record = world.rank(r).rank->mailbox().error;
      records += record.kind == ErrorKind::kMismatch && record.wait == wait;
    }
    if (records == 0) print_records(world);
    return records;
  };
  prepare(world);
  for (int r = 0; r < world.num_ranks(); ++r) world.dispatch(r, true, r == 0 ? 7 : 8);
  world.synchronise();
  verdict.expect(count(WaitFor::kTag) > 0, "mismatch of tags in dispatch", 0);
  world.reset();
  for (int r = 0; r < world.num_ranks(); ++r) world.dispatch(r);
  for (int r = 0; r < world.num_ranks(); ++r) world.combine(r, false, false, false, r == 0 ? 7 : 8);
  world.synchronise();
  verdict.expect(count(WaitFor::kTag) > 0, "mismatch of tags in combine", 0);
  const std::vector<char> out = world.rank(0).out.take();
  verdict.expect(is_nan_row(out.data(), world), "combine's result spoiled", 0);
  world.reset();
  world.use(0);
  world.rank(0).rank_operand.put({1});
  for (int r = 0; r < world.num_ranks(); ++r) world.dispatch(r);
  world.synchronise();
  verdict.expect(count(WaitFor::kStart) == 1, "another rank's operand", 0);
  world.use(0);
  world.rank(0).rank_operand.put({0});
  world.reset();
}

// A captured dispatch and combine, replayed: epochs advance on the device.
inline void check_graph(World& world, int replays, Verdict& verdict) {
  prepare(world);
  const Truth truth = make_truth(world, world.capacity());
  make_expert_outputs(world, truth);
  launch_all(world, false, [&](int r) { world.dispatch(r); });
  world.synchronise();
  std::vector<cudaGraphExec_t> graphs;
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    RankData& d = world.rank(r);
    d.row_weights.put(d.weights.take());
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    world.dispatch(r);
    world.combine(r, true, false);
    check(cudaStreamEndCapture(d.stream, &graph), "end capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    check(cudaGraphUpload(executable, d.stream), "upload");
    check(cudaGraphDestroy(graph), "destroy graph");
    graphs.push_back(executable);
  }
  world.poison();
  for (int i = 0; i < replays; ++i) {
    for (int r = 0; r < world.num_ranks(); ++r) {
      world.use(r);
      check(cudaGraphLaunch(graphs[r], world.rank(r).stream), "replay");
    }
  }
  world.synchronise();
  check_dispatch(world, truth, verdict);
  check_combine(world, truth, true, false, verdict);
  // Closed: the same graph touches nothing and ends.
  for (int r = 0; r < world.num_ranks(); ++r) world.rank(r).rank->shut();
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    check(cudaGraphLaunch(graphs[r], world.rank(r).stream), "replay after closing");
  }
  world.synchronise();
  for (int r = 0; r < world.num_ranks(); ++r) check_spoiled(world, r, verdict);
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph), "destroy");
}

inline int64_t run_fault_checks(uint64_t seed, int num_devices) {
  int64_t wrong = 0;
  for (const bool virtual_ranks : {true, false}) {
    for (const bool bulk : {true, false}) {
      if (!virtual_ranks && num_devices < 2) continue;
      Case c{"faults",
             virtual_ranks ? 4 : 2,
             virtual_ranks ? std::vector<int>{0} : std::vector<int>{0, 1},
             200,
             1024,
             8,
             64};
      c.bulk = bulk;
      World world(c, seed, 0.2);
      Verdict verdict(std::string("faults, ") + (bulk ? "bulk" : "plain"));
      check_straggler(world, verdict);
      check_missing_rank(world, verdict);
      world.reset();
      check_mismatches(world, verdict);
      wrong += check_round(world, true, "after reset");
      check_graph(world, 200, verdict);
      wrong += verdict.wrong();
      std::printf("faults, %s, %s: %s\n", virtual_ranks ? "4 virtual ranks" : "2 GPUs",
                  bulk ? "bulk" : "plain", verdict.wrong() == 0 ? "ok" : "WRONG");
      std::fflush(stdout);
    }
  }
  return wrong;
}

}  // namespace jax_ep::gpu::test
