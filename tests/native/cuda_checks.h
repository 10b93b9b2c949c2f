// Fresh random inputs, every operation once, every output compared with the oracle.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "cuda_oracle.h"

namespace jax_ep::gpu::test {

// Counts wrong values and prints the first.
class Verdict {
 public:
  explicit Verdict(std::string where) : where_(std::move(where)) {}
  void expect(bool ok, const char* what, int64_t index) {
    if (ok || wrong_.fetch_add(1) != 0) return;
    std::printf("  WRONG %s: %s, index %lld\n", where_.c_str(), what,
                static_cast<long long>(index));
  }
  int64_t wrong() const { return wrong_; }

 private:
  const std::string where_;
  std::atomic<int64_t> wrong_{0};
};

inline uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDull;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ull;
  return x ^ (x >> 33);
}

// Rows that are not `wanted` stay as they are first: zeros.
template <class Wanted>
std::vector<char> random_rows(int64_t rows, int hidden, RowType type, uint64_t seed,
                              Wanted wanted) {
  const int64_t row_bytes = int64_t{hidden} * row_type_bytes(type);
  std::vector<char> data(rows * row_bytes);
  parallel(rows, [&](int64_t row) {
    if (!wanted(row)) return;
    for (int i = 0; i < hidden; ++i) {
      const uint64_t bits = mix(seed + static_cast<uint64_t>(row) * hidden + i);
      const float value = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-30f;
      write_element(data.data() + row * row_bytes, i, type, value);
    }
  });
  return data;
}

inline std::vector<char> random_rows(int64_t rows, int hidden, RowType type, uint64_t seed) {
  return random_rows(rows, hidden, type, seed, [](int64_t) { return true; });
}

inline std::vector<int32_t> random_experts(World& world, int rank) {
  const Case& c = world.c();
  std::mt19937_64& random = world.random();
  std::vector<int32_t> topk;
  std::vector<int32_t> order(c.num_experts);
  std::iota(order.begin(), order.end(), 0);
  const bool empty = c.routing == Routing::kSomeRanksEmpty && rank % 2 == 1;
  for (int t = 0; t < c.num_tokens; ++t) {
    int from = c.num_experts;
    if (c.routing == Routing::kSkewed) from = std::min(from, c.num_experts_per_tok + 1);
    if (c.routing == Routing::kOneRank)
      from = std::max(world.experts_per_rank(), c.num_experts_per_tok);
    for (int k = 0; k < c.num_experts_per_tok; ++k) {
      std::swap(order[k], order[k + random() % (from - k)]);
      int32_t expert = empty ? -1 : order[k];
      if (c.routing == Routing::kFaulty) {
        const uint64_t dice = random() % 10;
        if (dice == 0) expert = -1;
        if (dice == 1) expert = static_cast<int32_t>(random());
        if (dice == 2 && k > 0) expert = topk.back();
      }
      topk.push_back(expert);
    }
    std::iota(order.begin(), order.end(), 0);
  }
  return topk;
}

inline void make_inputs(World& world) {
  const Case& c = world.c();
  std::mt19937_64& random = world.random();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    RankData& d = world.rank(r);
    d.host_x = random_rows(c.num_tokens, c.hidden, c.type, random());
    d.host_g = random_rows(c.num_tokens, c.hidden, c.type, random());
    d.host_topk = random_experts(world, r);
    d.host_topk_weights.resize(world.entries());
    for (float& weight : d.host_topk_weights) weight = static_cast<float>(random() % 10007) / 10007;
    d.x.put(d.host_x);
    d.g.put(d.host_g);
    d.topk.put(d.host_topk);
    d.topk_weights.put(d.host_topk_weights);
  }
}

inline int64_t choose_capacity(World& world) {
  const Case& c = world.c();
  const int64_t worst = int64_t{c.num_ranks} * c.num_tokens *
                            std::min(c.num_experts_per_tok, world.experts_per_rank()) +
                        int64_t{world.experts_per_rank()} * (c.alignment - 1);
  int64_t capacity = worst;
  if (c.capacity != Capacity::kWorst) {
    const Truth truth = make_truth(world, worst);
    capacity = *std::max_element(truth.padded_rows.begin(), truth.padded_rows.end());
    if (c.capacity == Capacity::kDropping) capacity = capacity * 2 / 3;
  }
  return std::max<int64_t>(c.alignment, align_up(capacity, c.alignment));
}

// Experts' outputs: NaN in rows that no token fills, which nobody may read.
inline void make_expert_outputs(World& world, const Truth& truth) {
  const Case& c = world.c();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    RankData& d = world.rank(r);
    const auto filled = [&](int64_t row) {
      return row < static_cast<int64_t>(truth.rows[r].size()) && truth.rows[r][row].source >= 0;
    };
    d.host_y = random_rows(world.capacity(), c.hidden, c.type, world.random()(), filled);
    d.host_row_scalars.assign(world.capacity(), NAN);
    for (int64_t row = 0; row < world.capacity(); ++row) {
      if (filled(row)) {
        d.host_row_scalars[row] = static_cast<float>(world.random()() % 10007);
      } else {
        std::memset(d.host_y.data() + row * world.row_bytes(), 0xFF, world.row_bytes());
      }
    }
    d.y.put(d.host_y);
    d.row_scalars.put(d.host_row_scalars);
  }
}

// Launches on all ranks, in random order and with random pauses.
template <class Launch>
void launch_all(World& world, bool pauses, Launch launch) {
  std::vector<int> order(world.num_ranks());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), world.random());
  for (int r : order) {
    launch(r);
    if (pauses && world.random()() % 3 == 0) usleep(world.random()() % 500);
  }
}

inline void check_dispatch(World& world, const Truth& truth, Verdict& verdict) {
  const Case& c = world.c();
  const int64_t row_bytes = world.row_bytes();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    RankData& d = world.rank(r);
    const auto compare = [&](const std::vector<int32_t>& got, const std::vector<int32_t>& want,
                             const char* what) {
      for (size_t i = 0; i < want.size(); ++i) verdict.expect(got[i] == want[i], what, i);
    };
    compare(d.group_sizes.take(), truth.group_sizes[r], "group_sizes");
    compare(d.valid_sizes.take(), truth.valid_sizes[r], "valid_sizes");
    compare(d.num_dropped.take(), {truth.dropped[r]}, "num_dropped");
    compare(d.sanitised.take(), truth.expert[r], "topk_idx");
    std::vector<int32_t> recv_rows;
    for (int s = 0; s < c.num_ranks; ++s) {
      for (int64_t i = 0; i < world.entries(); ++i) {
        const int e = truth.expert[s][i];
        recv_rows.push_back(e >= 0 && e / world.experts_per_rank() == r ? truth.row_of[s][i] : -1);
      }
    }
    compare(d.recv_rows.take(), recv_rows, "recv_rows");
    const std::vector<float> weights = d.weights.take();
    const std::vector<char> tokens = d.tokens.take();
    const auto num_rows = static_cast<int64_t>(truth.rows[r].size());
    parallel(world.capacity(), [&](int64_t row) {
      const RowSource from = row < num_rows ? truth.rows[r][row] : RowSource{};
      const char* got = tokens.data() + row * row_bytes;
      const RankData& source = world.rank(std::max(0, from.source));
      if (from.source >= 0) {
        const char* want = source.host_x.data() + from.token * row_bytes;
        verdict.expect(std::memcmp(got, want, row_bytes) == 0, "tokens", row);
        const float weight = source.host_topk_weights[from.token * c.num_experts_per_tok + from.k];
        verdict.expect(weights[row] == weight, "weights", row);
        return;
      }
      verdict.expect(weights[row] == 0.0f, "weights of unfilled rows", row);
      if (row >= num_rows && !c.zero_tail) return;
      verdict.expect(std::all_of(got, got + row_bytes, [](char byte) { return byte == 0; }),
                     "zeros of unfilled rows", row);
    });
  }
}

inline void check_combine(World& world, const Truth& truth, bool weighted, bool with_scalars,
                          Verdict& verdict) {
  const Case& c = world.c();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> out = world.rank(r).out.take();
    parallel(c.num_tokens, [&](int64_t token) {
      const std::vector<char> want = expected_sum(world, truth, r, token, weighted);
      const char* got = out.data() + token * world.row_bytes();
      verdict.expect(std::memcmp(got, want.data(), want.size()) == 0, "combined row", token);
    });
    if (!with_scalars) continue;
    const std::vector<float> scalars = world.rank(r).scalars.take();
    for (int64_t i = 0; i < world.entries(); ++i) {
      const int row = truth.row_of[r][i];
      const int peer = std::max(0, truth.expert[r][i]) / world.experts_per_rank();
      const float want = row >= 0 ? world.rank(peer).host_row_scalars[row] : 0.0f;
      verdict.expect(scalars[i] == want, "scalars", i);
    }
  }
}

inline void check_combine_grad(World& world, const Truth& truth, Verdict& verdict) {
  const Case& c = world.c();
  const int64_t row_bytes = world.row_bytes();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> d_y = world.rank(r).d_y.take();
    const std::vector<float> d_weights = world.rank(r).d_row_weights.take();
    const auto num_rows = static_cast<int64_t>(truth.rows[r].size());
    parallel(world.capacity(), [&](int64_t row) {
      const RowSource from = row < num_rows ? truth.rows[r][row] : RowSource{};
      const char* got = d_y.data() + row * row_bytes;
      std::vector<char> want(row_bytes, 0);
      float dot = 0.0f;
      if (from.source >= 0) {
        const RankData& source = world.rank(from.source);
        const char* g = source.host_g.data() + from.token * row_bytes;
        const float weight = source.host_topk_weights[from.token * c.num_experts_per_tok + from.k];
        for (int i = 0; i < c.hidden; ++i) {
          write_element(want.data(), i, c.type, weight * read_element(g, i, c.type));
        }
        dot = expected_dot(world.rank(r).host_y.data() + row * row_bytes, g, c.hidden, c.type);
      }
      verdict.expect(std::memcmp(&d_weights[row], &dot, 4) == 0, "d_row_weights", row);
      if (row >= num_rows && !c.zero_tail) return;
      verdict.expect(std::memcmp(got, want.data(), row_bytes) == 0, "d_y", row);
    });
  }
}

inline void check_faults(World& world, const Truth& truth, int repeats, Verdict& verdict) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    Mailbox& mailbox = world.rank(r).rank->mailbox();
    const uint64_t found = mailbox.faults_found - mailbox.faults_taken;
    verdict.expect(found == static_cast<uint64_t>(truth.faults[r] * repeats), "faults", r);
    if (found == 0) continue;
    const DataFault fault = unpack_fault(mailbox.first_fault);
    const int64_t index = int64_t{fault.token} * world.c().num_experts_per_tok + fault.k;
    const auto& topk = world.rank(r).host_topk;
    int64_t first = 0;
    while (topk[first] == truth.expert[r][first]) ++first;
    verdict.expect(index == first && topk[first] == fault.value, "first fault", first);
    mailbox.faults_taken = mailbox.faults_found;
  }
}

// One round of all operations. Several rounds share a world, so that epochs and buffers turn over.
inline int64_t check_round(World& world, bool pauses, const std::string& where) {
  Verdict verdict(where);
  make_inputs(world);
  world.set_capacity(choose_capacity(world));
  const Truth truth = make_truth(world, world.capacity());
  make_expert_outputs(world, truth);

  world.poison();
  const int repeats = 1 + static_cast<int>(world.random()() % 3);
  for (int i = 0; i < repeats; ++i) launch_all(world, pauses, [&](int r) { world.dispatch(r); });
  world.synchronise();
  check_dispatch(world, truth, verdict);
  check_faults(world, truth, repeats, verdict);
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.use(r);
    world.rank(r).row_weights.put(world.rank(r).weights.take());
  }

  for (const auto& [weighted, with_scalars] : {std::pair{true, false}, std::pair{false, true}}) {
    for (int r = 0; r < world.num_ranks(); ++r) {
      world.use(r);
      world.rank(r).out.poison();
      world.rank(r).scalars.poison();
    }
    world.synchronise();
    const bool w = weighted;
    const bool s = with_scalars;
    launch_all(world, pauses, [&](int r) { world.combine(r, w, s); });
    world.synchronise();
    check_combine(world, truth, w, s, verdict);
  }

  launch_all(world, pauses, [&](int r) { world.combine_grad(r); });
  world.synchronise();
  check_combine_grad(world, truth, verdict);
  for (int r = 0; r < world.num_ranks(); ++r) {
    verdict.expect(world.rank(r).rank->mailbox().error.kind == ErrorKind::kNone, "error record", r);
  }
  return verdict.wrong();
}

}  // namespace jax_ep::gpu::test
