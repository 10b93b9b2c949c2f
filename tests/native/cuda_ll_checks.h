// Low-latency operations against the oracle: fresh inputs each round, fused and in halves.
#pragma once

#include <cmath>

#include "cuda_faults.h"
#include "cuda_ll_world.h"
#include "cuda_progress.h"

namespace jax_ep::gpu::test {

// ---- What float8 rows must hold, by searching the nearest of all float8 numbers.

constexpr int kLargestCode = 0x7E;

// Numbers by code: they ascend.
inline const std::vector<double>& e4m3_numbers() {
  static const std::vector<double> numbers = [] {
    std::vector<double> made;
    for (int code = 0; code <= kLargestCode; ++code) {
      const int exponent = code >> 3;
      made.push_back(exponent == 0 ? std::ldexp(code, -9)
                                   : std::ldexp(8 + code % 8, exponent - 10));
    }
    return made;
  }();
  return numbers;
}
inline double e4m3_number(int code) { return e4m3_numbers()[code]; }
inline uint8_t nearest_e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const std::vector<double>& numbers = e4m3_numbers();
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude);
  int best = std::min(kLargestCode, static_cast<int>(above - numbers.begin()));
  if (best > 0) {
    const double up = std::fabs(numbers[best] - magnitude);
    const double down = std::fabs(magnitude - numbers[best - 1]);
    if (down < up || (down == up && best % 2 != 0)) --best;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

struct QuantizedRow {
  std::vector<uint8_t> values;
  std::vector<float> scales;
  std::vector<char> back;  // dequantised
};

inline QuantizedRow quantize_row(const char* row, int hidden, RowType type, bool power_of_two) {
  QuantizedRow q;
  q.values.resize(hidden);
  q.back.resize(int64_t{hidden} * row_type_bytes(type));
  for (int first = 0; first < hidden; first += 128) {
    const int end = std::min(hidden, first + 128);
    float amax = 0.0f;
    for (int i = first; i < end; ++i) amax = std::max(amax, std::fabs(read_element(row, i, type)));
    float scale = 1.0f;
    float inverse = 1.0f;
    if (amax >= std::ldexp(1.0f, -100)) {
      scale = amax * (1.0f / 448.0f);
      inverse = 448.0f / amax;
      if (power_of_two) {
        int exponent;
        const float mantissa = std::frexp(scale, &exponent);  // in [0.5, 1)
        scale = std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
        inverse = 1.0f / scale;
      }
    }
    q.scales.push_back(scale);
    for (int i = first; i < end; ++i) {
      const uint8_t code = nearest_e4m3(read_element(row, i, type) * inverse);
      q.values[i] = code;
      const auto number = static_cast<float>(e4m3_number(code & 0x7F));
      write_element(q.back.data(), i, type, (code & 0x80 ? -number : number) * scale);
    }
  }
  return q;
}

// ---- What the operations must give.

// As make_truth(), with the padded layout's rows.
inline Truth make_ll_truth(World& world, bool padded, int64_t capacity) {
  Truth truth = make_truth(world, int64_t{1} << 30);
  if (!padded) return make_truth(world, capacity);
  const Case& c = world.c();
  const int64_t place = int64_t{c.num_ranks} * c.num_tokens;
  for (int r = 0; r < c.num_ranks; ++r) {
    std::vector<RowSource> rows(place * world.experts_per_rank());
    int64_t next = 0;
    for (int e = 0; e < world.experts_per_rank(); ++e) {
      for (int i = 0; i < truth.group_sizes[r][e]; ++i) {
        const RowSource from = truth.rows[r][next++];
        rows[e * place + i] = from;
        truth.row_of[from.source][from.token * c.num_experts_per_tok + from.k] =
            static_cast<int32_t>(e * place + i);
      }
    }
    truth.rows[r] = rows;
  }
  return truth;
}

inline void expect_equal(Verdict& verdict, const std::string& what, int rank, int64_t index,
                         double got, double want) {
  if (got == want) return;
  if (verdict.wrong() == 0) {
    std::printf("  rank %d, %s[%lld]: got %.9g, want %.9g\n", rank, what.c_str(),
                static_cast<long long>(index), got, want);
  }
  verdict.expect(false, what.c_str(), index);
}

template <class T>
void expect_all(Verdict& verdict, const std::string& what, int rank, const std::vector<T>& got,
                const std::vector<T>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    expect_equal(verdict, what, rank, static_cast<int64_t>(i), static_cast<double>(got[i]),
                 static_cast<double>(want[i]));
  }
}

// Says where a row differs first, and how.
inline void expect_bytes(Verdict& verdict, const char* what, int rank, int64_t row,
                         const RowSource& from, const char* got, const char* want, int64_t bytes) {
  if (std::memcmp(got, want, bytes) == 0) return;
  int64_t at = 0;
  while (got[at] == want[at]) ++at;
  at = at / 4 * 4;
  uint32_t words[2];
  std::memcpy(&words[0], got + at, 4);
  std::memcpy(&words[1], want + at, 4);
  if (verdict.wrong() == 0) {
    std::printf(
        "  rank %d, %s row %lld (source %d token %d k %d), byte %lld of %lld: got %08x, want "
        "%08x\n",
        rank, what, static_cast<long long>(row), from.source, from.token, from.k,
        static_cast<long long>(at), static_cast<long long>(bytes), words[0], words[1]);
  }
  verdict.expect(false, what, row);
}

inline void check_ll_rows(LlWorld& ll, const Truth& truth, int slot, bool cotangents,
                          Verdict& verdict) {
  World& world = ll.world();
  const Case& c = world.c();
  const bool quantized = ll.mode().output != LlOutput::kRows;
  const int64_t groups = num_scales(c.hidden);
  const auto sent_row = [&](int source, int64_t token) {
    const RankData& d = world.rank(source);
    return (cotangents ? d.host_g : d.host_x).data() + token * world.row_bytes();
  };
  std::vector<QuantizedRow> quantised(quantized ? int64_t{c.num_ranks} * c.num_tokens : 0);
  parallel(static_cast<int64_t>(quantised.size()), [&](int64_t i) {
    const char* x = sent_row(static_cast<int>(i / c.num_tokens), i % c.num_tokens);
    quantised[i] = quantize_row(x, c.hidden, c.type, ll.mode().power_of_two);
  });
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    LlOutputs& o = ll.rank(r).slot[slot];
    const std::vector<char> tokens = o.tokens.take();
    const std::vector<float> scales = o.scales.take();
    const std::vector<float> weights = o.weights.take();
    const int64_t bytes = ll.output_row_bytes();
    const auto num_rows = static_cast<int64_t>(truth.rows[r].size());
    for (int64_t row = 0; row < world.capacity(); ++row) {
      const RowSource from = row < num_rows ? truth.rows[r][row] : RowSource{};
      const char* got = tokens.data() + row * bytes;
      if (from.source < 0) {
        expect_equal(verdict, "weights of no row", r, row, weights[row], 0.0);
        if (ll.mode().padded || !c.zero_tail) continue;
        const std::vector<char> zeros(bytes, 0);
        expect_bytes(verdict, "zero tail", r, row, from, got, zeros.data(), bytes);
        continue;
      }
      RankData& source = world.rank(from.source);
      expect_equal(verdict, "weights", r, row, weights[row],
                   source.host_topk_weights[from.token * c.num_experts_per_tok + from.k]);
      if (!quantized) {
        expect_bytes(verdict, "tokens", r, row, from, got, sent_row(from.source, from.token),
                     bytes);
        continue;
      }
      const QuantizedRow& want = quantised[int64_t{from.source} * c.num_tokens + from.token];
      if (ll.mode().output == LlOutput::kDequantized) {
        expect_bytes(verdict, "dequantised", r, row, from, got, want.back.data(), bytes);
        continue;
      }
      expect_bytes(verdict, "scales", r, row, from,
                   reinterpret_cast<const char*>(scales.data() + row * groups),
                   reinterpret_cast<const char*>(want.scales.data()), 4 * groups);
      expect_bytes(verdict, "values", r, row, from, got,
                   reinterpret_cast<const char*>(want.values.data()), bytes);
    }
  }
}

inline void check_ll_dispatch(LlWorld& ll, const Truth& truth, int slot, bool cotangents,
                              Verdict& verdict) {
  World& world = ll.world();
  const Case& c = world.c();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    LlOutputs& o = ll.rank(r).slot[slot];
    expect_all(verdict, "group_sizes", r, o.group_sizes.take(), truth.group_sizes[r]);
    expect_all(verdict, "valid_sizes", r, o.valid_sizes.take(), truth.valid_sizes[r]);
    expect_all(verdict, "num_dropped", r, o.num_dropped.take(), {truth.dropped[r]});
    expect_all(verdict, "topk_idx", r, o.sanitised.take(), truth.expert[r]);
    std::vector<int32_t> recv_rows;
    std::vector<int32_t> expert_tokens = ll.rank(r).expert_tokens_before.take();
    for (size_t e = 0; e < expert_tokens.size(); ++e) expert_tokens[e] += truth.group_sizes[r][e];
    for (int s = 0; s < c.num_ranks; ++s) {
      for (int64_t i = 0; i < world.entries(); ++i) {
        const int e = truth.expert[s][i];
        const bool here = e >= 0 && e / world.experts_per_rank() == r;
        recv_rows.push_back(here ? truth.row_of[s][i] : -1);
      }
    }
    expect_all(verdict, "recv_rows", r, o.recv_rows.take(), recv_rows);
    expect_all(verdict, "expert_tokens", r, o.expert_tokens.take(), expert_tokens);
    const std::vector<uint32_t> waited = o.waited.take();
    for (int peer = 0; peer < c.num_ranks; ++peer) {
      const int64_t added = int64_t{waited[peer]} - kWaitedBefore;
      verdict.expect(peer == r ? added == 0 : added >= 0 && added < 4000000000, "waited_ns", r);
    }
    expect_all(verdict, "order_token", r, o.order_token.take(), {0.0f});
    o.order_token.poison();
  }
  check_ll_rows(ll, truth, slot, cotangents, verdict);
}

inline void check_ll_sums(LlWorld& ll, const Truth& truth, int slot, bool weighted,
                          bool with_scalars, Verdict& verdict) {
  World& world = ll.world();
  const Case& c = world.c();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> out = ll.rank(r).slot[slot].out.take();
    expect_all(verdict, "order_token", r, ll.rank(r).slot[slot].order_token.take(), {0.0f});
    std::vector<std::vector<char>> sums(c.num_tokens);
    parallel(c.num_tokens, [&](int64_t t) {
      sums[t] = expected_sum(world, truth, r, static_cast<int>(t), weighted);
    });
    for (int t = 0; t < c.num_tokens; ++t) {
      const std::vector<char>& want = sums[t];
      expect_bytes(verdict, weighted ? "sum" : "unweighted sum", r, t, {r, t, 0},
                   out.data() + t * world.row_bytes(), want.data(), world.row_bytes());
    }
    if (!with_scalars) continue;
    const std::vector<float> scalars = ll.rank(r).slot[slot].scalars.take();
    for (int64_t i = 0; i < world.entries(); ++i) {
      const int row = truth.row_of[r][i];
      const int peer = std::max(0, truth.expert[r][i]) / world.experts_per_rank();
      expect_equal(verdict, "scalars", r, i, scalars[i],
                   row >= 0 ? world.rank(peer).host_row_scalars[row] : 0.0f);
    }
  }
}

// Two operations on each channel, in flight together when `halves`, else one after the other.
// Halves with pauses: a rank's first done is launched before the next rank's starts are, and has to
// wait. Not its second too, and not with many ranks: streams of one device that share a queue would
// wait behind it.
template <class Launch>
void launch_two(LlWorld& ll, bool halves, bool pauses, Launch launch) {
  constexpr int kFewRanks = 8;
  World& world = ll.world();
  const int num_steps = halves ? 4 : 2;
  const int together = halves && pauses && world.num_ranks() <= kFewRanks ? 3 : 1;
  for (int first = 0; first < num_steps; first += together) {
    launch_all(world, pauses, [&](int r) {
      for (int step = first; step < std::min(first + together, num_steps); ++step) {
        launch(r, step % 2, step < 2);
      }
    });
  }
}

inline int64_t check_ll_round(LlWorld& ll, bool halves, bool pauses, const std::string& where) {
  World& world = ll.world();
  Verdict verdict(where);
  step("making inputs");
  make_inputs(world);
  world.set_capacity(ll.mode().padded ? ll.padded_capacity() : choose_capacity(world));
  const Truth truth = make_ll_truth(world, ll.mode().padded, world.capacity());
  make_expert_outputs(world, truth);
  ll.poison();
  step("dispatches on the GPUs");
  launch_two(ll, halves, pauses, [&](int r, int slot, bool first) {
    const LlTurn turn = !halves ? LlTurn::fused()
                        : first ? ll.start_dispatch(r, slot)
                                : ll.done_dispatch(r, slot);
    ll.dispatch(r, turn, slot, slot == 0 ? world.rank(r).x : world.rank(r).g);
  });
  world.synchronise();
  step("checking dispatches");
  check_ll_dispatch(ll, truth, 0, false, verdict);
  check_ll_dispatch(ll, truth, 1, true, verdict);
  check_faults(world, truth, 2, verdict);

  step("combines on the GPUs");
  launch_two(ll, halves, pauses, [&](int r, int slot, bool first) {
    const LlTurn turn = !halves ? LlTurn::fused()
                        : first ? ll.start_combine(r, slot)
                                : ll.done_combine(r, slot);
    ll.combine(r, turn, slot, slot == 0, slot == 1);
  });
  world.synchronise();
  step("checking sums");
  check_ll_sums(ll, truth, 0, true, false, verdict);
  check_ll_sums(ll, truth, 1, false, true, verdict);

  step("combine_grad on the GPUs");
  launch_all(world, pauses, [&](int r) { ll.combine_grad(r); });
  world.synchronise();
  step("checking combine_grad");
  check_combine_grad(world, truth, verdict);
  bool recorded = false;
  for (int r = 0; r < world.num_ranks(); ++r) {
    recorded |= world.rank(r).rank->mailbox().error.kind != ErrorKind::kNone;
  }
  verdict.expect(!recorded, "error record", 0);
  if (recorded) print_records(world);
  return verdict.wrong();
}

}  // namespace jax_ep::gpu::test
