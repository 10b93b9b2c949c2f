// One copy per message instead of one per expert: dispatch's slots and row map, and combine of rows
// that lie in slots.
#pragma once

#include "cuda_checks.h"

namespace jax_ep::gpu::test {

// Whether token `token` of rank `source` has a row here that fits.
inline bool is_kept(World& world, const Truth& truth, int source, int token, int here) {
  for (int k = 0; k < world.c().num_experts_per_tok; ++k) {
    const int64_t entry = int64_t{token} * world.c().num_experts_per_tok + k;
    const int e = truth.expert[source][entry];
    if (e >= 0 && e / world.experts_per_rank() == here && truth.row_of[source][entry] >= 0) {
      return true;
    }
  }
  return false;
}

inline void check_slots(World& world, const Truth& truth, Verdict& verdict) {
  const Case& c = world.c();
  const int64_t row_bytes = world.row_bytes();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> slots = world.rank(r).slots.take();
    const std::vector<int32_t> row_map = world.rank(r).row_map.take();
    parallel(world.num_slots(), [&](int64_t slot) {
      const int source = static_cast<int>(slot / c.num_tokens);
      const int token = static_cast<int>(slot % c.num_tokens);
      std::vector<char> want(row_bytes, 0);
      if (is_kept(world, truth, source, token, r)) {
        std::memcpy(want.data(), world.rank(source).host_x.data() + token * row_bytes, row_bytes);
      }
      const char* got = slots.data() + slot * row_bytes;
      verdict.expect(std::memcmp(got, want.data(), row_bytes) == 0, "slots", slot);
    });
    for (int64_t row = 0; row < world.capacity(); ++row) {
      const bool known = row < static_cast<int64_t>(truth.rows[r].size());
      const RowSource from = known ? truth.rows[r][row] : RowSource{};
      const int64_t want =
          from.source < 0 ? world.num_slots() : int64_t{from.source} * c.num_tokens + from.token;
      verdict.expect(row_map[row] == want, "row_map", row);
    }
  }
}

inline void check_combined_slots(World& world, const Truth& truth,
                                 const std::vector<std::vector<char>>& slots, Verdict& verdict) {
  const Case& c = world.c();
  const int64_t row_bytes = world.row_bytes();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> out = world.rank(r).out.take();
    parallel(c.num_tokens, [&](int64_t token) {
      std::vector<float> sum(c.hidden, 0.0f);
      for (const int peer : order_of_sum(r, c.num_ranks)) {
        if (!is_kept(world, truth, r, static_cast<int>(token), peer)) continue;
        const char* row = slots[peer].data() + (int64_t{r} * c.num_tokens + token) * row_bytes;
        for (int i = 0; i < c.hidden; ++i) sum[i] += read_element(row, i, c.type);
      }
      std::vector<char> want(row_bytes);
      for (int i = 0; i < c.hidden; ++i) write_element(want.data(), i, c.type, sum[i]);
      verdict.expect(std::memcmp(out.data() + token * row_bytes, want.data(), row_bytes) == 0,
                     "combined slots", token);
    });
  }
}

// After check_round(), along its inputs.
inline int64_t check_unexpanded(World& world, bool pauses, const std::string& where) {
  Verdict verdict(where + ", unexpanded");
  const Truth truth = make_truth(world, world.capacity());
  world.poison();
  launch_all(world, pauses, [&](int r) { world.dispatch(r, false); });
  world.synchronise();
  check_slots(world, truth, verdict);
  check_faults(world, truth, 1, verdict);

  std::vector<std::vector<char>> slots;
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    slots.push_back(
        random_rows(world.num_slots(), world.c().hidden, world.c().type, world.random()()));
    world.rank(r).slots.put(slots.back());
  }
  launch_all(world, pauses, [&](int r) { world.combine(r, false, true, true); });
  world.synchronise();
  check_combined_slots(world, truth, slots, verdict);
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    const std::vector<float> scalars = world.rank(r).scalars.take();
    for (int64_t i = 0; i < world.entries(); ++i) {
      const int row = truth.row_of[r][i];
      const int peer = std::max(0, truth.expert[r][i]) / world.experts_per_rank();
      const float want = row >= 0 ? world.rank(peer).host_row_scalars[row] : 0.0f;
      verdict.expect(scalars[i] == want, "scalars beside slots", i);
    }
  }
  return verdict.wrong();
}

}  // namespace jax_ep::gpu::test
