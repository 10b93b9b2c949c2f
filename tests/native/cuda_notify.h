// Notify, and dispatch along its routing: the routing and the host's counters against the truth,
// and dispatch's results against the same oracle as without.
#pragma once

#include "cuda_checks.h"
#include "cuda_faults.h"

namespace jax_ep::gpu::test {

inline void set_ticket(World& world, uint32_t ticket) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    world.rank(r).ticket.put({ticket});
  }
}

// counts[s][e], as they must be on every rank.
inline std::vector<int32_t> true_counts(World& world, const Truth& truth) {
  const int64_t num_experts = world.c().num_experts;
  std::vector<int32_t> counts(world.num_ranks() * num_experts, 0);
  for (int s = 0; s < world.num_ranks(); ++s) {
    for (int32_t expert : truth.expert[s]) {
      if (expert >= 0) ++counts[s * num_experts + expert];
    }
  }
  return counts;
}

inline void check_routing(World& world, const Truth& truth, Verdict& verdict) {
  const std::vector<int32_t> counts = true_counts(world, truth);
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    RankData& d = world.rank(r);
    const std::vector<int32_t> got = d.counts.take();
    for (size_t i = 0; i < counts.size(); ++i) verdict.expect(got[i] == counts[i], "counts", i);
    const std::vector<int32_t> sanitised = d.sanitised.take();
    const std::vector<int32_t> row_index = d.row_index.take();
    std::vector<int32_t> next(world.c().num_experts, 0);
    for (int64_t i = 0; i < world.entries(); ++i) {
      const int expert = truth.expert[r][i];
      verdict.expect(sanitised[i] == expert, "sanitised", i);
      verdict.expect(row_index[i] == (expert >= 0 ? next[expert]++ : -1), "row_index", i);
    }
  }
}

// What the host finds in a ticket's slot.
inline void check_host(World& world, const Truth& truth, uint32_t ticket, Verdict& verdict) {
  const std::vector<int32_t> counts = true_counts(world, truth);
  const int num_experts = world.c().num_experts;
  const NoticeLayout notice{num_experts};
  for (int r = 0; r < world.num_ranks(); ++r) {
    const uint64_t* words = world.rank(r).counters->host().first;
    const auto word = [&](int64_t index) {
      return __atomic_load_n(words + index, __ATOMIC_ACQUIRE);
    };
    uint32_t here = 0;
    for (int e = 0; e < num_experts; ++e) {
      uint32_t rows = 0;
      for (int s = 0; s < world.num_ranks(); ++s) rows += counts[int64_t{s} * num_experts + e];
      if (e / world.experts_per_rank() == r) here += rows;
      verdict.expect(word(notice.expert_tokens(ticket, e)) == ticket_word(ticket, rows),
                     "host's counter of an expert", e);
    }
    verdict.expect(word(notice.recv_tokens(ticket)) == ticket_word(ticket, here),
                   "host's counter of a rank", r);
  }
}

// Notify once without a ticket, twice with (the second under an earlier ticket of the same slot,
// which must not be told), then dispatch along the routing, twice.
inline int64_t check_notify(World& world, bool pauses, const std::string& where) {
  Verdict verdict(where + ", notify");
  make_inputs(world);
  world.set_capacity(choose_capacity(world));
  const Truth truth = make_truth(world, world.capacity());
  // Later than all before: an earlier one in the same slot is not told.
  static uint32_t ticket = 100 * kNoticeSlots;
  ticket += kNoticeSlots + static_cast<uint32_t>(world.random()() % 1000);
  world.poison();
  for (uint32_t given : {kNoTicket, ticket, ticket - kNoticeSlots}) {
    set_ticket(world, given);
    world.synchronise();
    launch_all(world, pauses, [&](int r) { world.notify(r); });
    world.synchronise();
    check_routing(world, truth, verdict);
    if (given != kNoTicket) check_host(world, truth, ticket, verdict);
  }
  check_faults(world, truth, 3, verdict);
  for (int repeat = 0; repeat < 2; ++repeat) {
    launch_all(world, pauses, [&](int r) { world.dispatch(r, true, 0, true); });
    world.synchronise();
    check_dispatch(world, truth, verdict);
    check_faults(world, Truth{truth.expert, std::vector<int64_t>(world.num_ranks(), 0)}, 1,
                 verdict);
  }
  for (int r = 0; r < world.num_ranks(); ++r) {
    verdict.expect(world.rank(r).rank->mailbox().error.kind == ErrorKind::kNone, "error record", r);
  }
  return verdict.wrong();
}

// The last rank never notifies: the others name it, tell their hosts nothing, and spoil.
inline int64_t check_missing_notify(World& world) {
  Verdict verdict("a rank that does not notify");
  const int missing = world.num_ranks() - 1;
  prepare(world);
  set_ticket(world, 7);
  const NoticeLayout notice{world.c().num_experts};
  std::vector<uint64_t> before;
  for (int r = 0; r < missing; ++r) {
    before.push_back(world.rank(r).counters->host().first[notice.recv_tokens(7)]);
    world.notify(r);
  }
  world.synchronise();
  bool named = false;
  for (int r = 0; r < missing; ++r) {
    const ErrorRecord& record = world.rank(r).rank->mailbox().error;
    if (record.kind == ErrorKind::kTimeout) {
      named = true;
      verdict.expect(record.op == OpKind::kNotify && record.wait == WaitFor::kTag &&
                         record.peer == missing && record.rank == r,
                     "who is late, and with what", r);
    }
    world.use(r);
    for (int row : world.rank(r).row_index.take()) verdict.expect(row == -1, "row_index", r);
    for (int count : world.rank(r).counts.take()) verdict.expect(count == 0, "counts", r);
    const uint64_t word = world.rank(r).counters->host().first[notice.recv_tokens(7)];
    verdict.expect(word == before[r], "the host's counter", r);
  }
  verdict.expect(named, "a timeout is recorded", 0);
  world.reset();
  return verdict.wrong();
}

inline int64_t run_notify_faults(uint64_t seed) {
  Case c{"notify faults", 4, {0}, 200, 1024, 8, 64};
  World world(c, seed, 0.2);
  int64_t wrong = check_notify(world, true, "before a fault");
  wrong += check_missing_notify(world);
  wrong += check_notify(world, true, "after reset");
  std::printf("faults of notify: %s\n", wrong == 0 ? "ok" : "WRONG");
  return wrong;
}

}  // namespace jax_ep::gpu::test
