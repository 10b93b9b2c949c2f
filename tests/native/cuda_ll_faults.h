// Low-latency operations out of turn, ranks that never come, other operations, closed buffers.
#pragma once

#include "cuda_ll_checks.h"

namespace jax_ep::gpu::test {

inline void check_ll_spoiled(LlWorld& ll, int r, int slot, Verdict& verdict) {
  ll.world().use(r);
  LlOutputs& o = ll.rank(r).slot[slot];
  for (int size : o.group_sizes.take()) verdict.expect(size == 0, "group_sizes spoiled", r);
  for (int row : o.recv_rows.take()) verdict.expect(row == -1, "recv_rows spoiled", r);
  for (float weight : o.weights.take()) verdict.expect(std::isnan(weight), "weights spoiled", r);
  const std::vector<char> tokens = o.tokens.take();
  for (int64_t row = 0; row < ll.world().capacity(); ++row) {
    verdict.expect(is_nan_row(tokens.data() + row * ll.world().row_bytes(), ll.world()),
                   "tokens spoiled", row);
  }
}

inline int count_ll_errors(LlWorld& ll, ErrorKind kind, WaitFor wait) {
  int records = 0;
  for (int r = 0; r < ll.world().num_ranks(); ++r) {
    const ErrorRecord& record = ll.world().rank(r).rank->mailbox().error;
    records += record.kind == kind && record.wait == wait;
  }
  if (records == 0) print_records(ll.world());
  return records;
}

inline void prepare_ll(LlWorld& ll) {
  make_inputs(ll.world());
  ll.world().set_capacity(ll.padded_capacity());
  ll.poison();
}

template <class TurnOf>
void dispatch_on_all(LlWorld& ll, int slot, TurnOf turn_of) {
  for (int r = 0; r < ll.world().num_ranks(); ++r) {
    ll.dispatch(r, turn_of(r), slot, ll.world().rank(r).x);
  }
}

// Each must be recorded at once by every rank, without waiting for anybody.
inline void check_out_of_turn(LlWorld& ll, Verdict& verdict) {
  World& world = ll.world();
  const auto expect_usage = [&](const char* what) {
    step(what);
    const auto start = std::chrono::steady_clock::now();
    world.synchronise();
    verdict.expect(count_ll_errors(ll, ErrorKind::kUsage, WaitFor::kStart) > 0, what, 0);
    verdict.expect(seconds_since(start) < 0.15, what, 1);
    world.reset();
    ll.poison();
  };
  prepare_ll(ll);
  for (int i = 0; i < 3; ++i) {
    dispatch_on_all(ll, i % 2, [&](int r) { return ll.start_dispatch(r, i % 2); });
  }
  expect_usage("a third start");
  dispatch_on_all(ll, 0, [&](int r) { return ll.start_dispatch(r, 0); });
  dispatch_on_all(ll, 1, [](int) { return LlTurn::fused(); });
  expect_usage("a fused operation between start and done");
  for (int slot : {0, 1}) {
    dispatch_on_all(ll, slot, [&](int r) { return ll.start_dispatch(r, slot); });
  }
  dispatch_on_all(ll, 1, [&](int r) { return ll.done_dispatch(r, 1); });
  expect_usage("done out of order");
  dispatch_on_all(ll, 0, [&](int r) { return ll.start_dispatch(r, 0); });
  for (int i = 0; i < 2; ++i) {
    dispatch_on_all(ll, 0, [&](int r) { return ll.done_dispatch(r, 0); });
  }
  expect_usage("done twice");
  // The epoch is the same again.
  dispatch_on_all(ll, 0, [&](int r) { return ll.start_dispatch(r, 0); });
  world.reset();
  dispatch_on_all(ll, 1, [&](int r) { return ll.start_dispatch(r, 1); });
  dispatch_on_all(ll, 0, [&](int r) { return ll.done_dispatch(r, 0); });
  expect_usage("done of a start from before a reset");
}

inline void check_ll_missing_rank(LlWorld& ll, bool halves, Verdict& verdict) {
  World& world = ll.world();
  const int missing = world.num_ranks() - 1;
  prepare_ll(ll);
  auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < missing; ++r) {
    if (halves) ll.dispatch(r, ll.start_dispatch(r, 0), 0, world.rank(r).x);
    ll.dispatch(r, halves ? ll.done_dispatch(r, 0) : LlTurn::fused(), 0, world.rank(r).x);
  }
  world.synchronise();
  const double waited = seconds_since(start);
  bool named = false;
  for (int r = 0; r < missing; ++r) {
    const ErrorRecord& record = world.rank(r).rank->mailbox().error;
    check_ll_spoiled(ll, r, 0, verdict);
    if (record.kind != ErrorKind::kTimeout) continue;
    named = true;
    verdict.expect(record.peer == missing && record.rank == r, "who is late", record.peer);
  }
  verdict.expect(named, "a timeout is recorded", 0);
  ll.poison();
  start = std::chrono::steady_clock::now();
  dispatch_on_all(ll, 0, [](int) { return LlTurn::fused(); });
  world.synchronise();
  const double later = seconds_since(start);
  for (int r = 0; r < world.num_ranks(); ++r) check_ll_spoiled(ll, r, 0, verdict);
  verdict.expect(waited > 0.15 && waited < 1.0 && later < 0.1, "deadlines hold", 0);
  std::printf("  missing rank: gave up after %.2f s, next operation took %.4f s\n", waited, later);
  world.reset();
}

inline void check_ll_mismatch(LlWorld& ll, Verdict& verdict) {
  World& world = ll.world();
  prepare_ll(ll);
  for (int r = 0; r < world.num_ranks(); ++r) {
    ll.set_site(r == 0 ? 7 : 8);
    ll.dispatch(r, LlTurn::fused(), 0, world.rank(r).x);
  }
  ll.set_site(0);
  world.synchronise();
  verdict.expect(count_ll_errors(ll, ErrorKind::kMismatch, WaitFor::kTag) > 0, "other tags", 0);
  world.reset();
}

inline void check_ll_closed(LlWorld& ll, Verdict& verdict) {
  World& world = ll.world();
  prepare_ll(ll);
  for (int r = 0; r < world.num_ranks(); ++r) world.rank(r).rank->shut();
  dispatch_on_all(ll, 0, [](int) { return LlTurn::fused(); });
  world.synchronise();
  for (int r = 0; r < world.num_ranks(); ++r) check_ll_spoiled(ll, r, 0, verdict);
}

inline int64_t run_ll_fault_checks(uint64_t seed, int num_devices) {
  int64_t wrong = 0;
  for (const bool virtual_ranks : {true, false}) {
    if (!virtual_ranks && num_devices < 2) continue;
    const std::vector<int> devices = virtual_ranks ? std::vector<int>{0} : std::vector<int>{0, 1};
    LlWorld ll(ll_case("faults", virtual_ranks ? 3 : 2, devices, 12, 256, 4, 24), {}, seed, 0.2);
    Verdict verdict("low-latency faults");
    begin_case(virtual_ranks ? "faults, 3 virtual ranks" : "faults, 2 GPUs");
    check_out_of_turn(ll, verdict);
    for (const bool halves : {false, true}) check_ll_missing_rank(ll, halves, verdict);
    check_ll_mismatch(ll, verdict);
    wrong += check_ll_round(ll, true, true, "after resets");
    check_ll_closed(ll, verdict);
    wrong += verdict.wrong();
    std::printf("faults, %s: %s\n", virtual_ranks ? "3 virtual ranks" : "2 GPUs",
                verdict.wrong() == 0 ? "ok" : "WRONG");
    std::fflush(stdout);
  }
  return wrong;
}

}  // namespace jax_ep::gpu::test
