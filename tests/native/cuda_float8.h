// Dispatch with float8 on its way: values and scales, and rows again, by the formula on the host.
#pragma once

#include "cuda_unexpanded.h"

namespace jax_ep::gpu::test {

// One way to quantise, of all tokens of all ranks.
struct QuantizedTokens {
  std::vector<std::vector<uint8_t>> values;  // [rank][T * H]
  std::vector<std::vector<float>> scales;    // [rank][T * G]
  std::vector<std::vector<char>> rows;       // [rank][T rows]
};

inline QuantizedTokens quantize_tokens(World& world, bool power_of_two) {
  const Case& c = world.c();
  const int groups = num_scales(c.hidden);
  QuantizedTokens to;
  for (int r = 0; r < c.num_ranks; ++r) {
    to.values.emplace_back(int64_t{c.num_tokens} * c.hidden);
    to.scales.emplace_back(int64_t{c.num_tokens} * groups);
    to.rows.emplace_back(c.num_tokens * world.row_bytes());
    const char* x = world.rank(r).host_x.data();
    parallel(int64_t{c.num_tokens} * groups, [&](int64_t i) {
      const int64_t token = i / groups;
      const int begin = static_cast<int>(i % groups) * kScaleGroup;
      const int end = std::min(c.hidden, begin + kScaleGroup);
      const char* row = x + token * world.row_bytes();
      float amax = 0.0f;
      for (int h = begin; h < end; ++h) {
        amax = std::max(amax, std::fabs(read_element(row, h, c.type)));
      }
      const GroupScale scale = group_scale(amax, power_of_two);
      to.scales[r][i] = scale.scale;
      for (int h = begin; h < end; ++h) {
        const uint8_t code = encode_e4m3(read_element(row, h, c.type) * scale.inverse);
        to.values[r][token * c.hidden + h] = code;
        write_element(to.rows[r].data() + token * world.row_bytes(), h, c.type,
                      dequantized(code, scale.scale));
      }
    });
  }
  return to;
}

// Row `row` of an output must be token `from`'s, or zeros: values of 0 with scales of 1.
inline void check_float8_row(World& world, const QuantizedTokens& known, RowSource from, bool pairs,
                             int64_t row, const char* tokens, const float* scales,
                             Verdict& verdict) {
  const Case& c = world.c();
  const int groups = num_scales(c.hidden);
  const int64_t bytes = pairs ? c.hidden : world.row_bytes();
  std::vector<char> want(bytes, 0);
  std::vector<float> want_scales(groups, 1.0f);
  if (from.source >= 0) {
    const char* all = pairs ? reinterpret_cast<const char*>(known.values[from.source].data())
                            : known.rows[from.source].data();
    std::memcpy(want.data(), all + from.token * bytes, bytes);
    std::memcpy(want_scales.data(), known.scales[from.source].data() + from.token * groups,
                4 * groups);
  }
  verdict.expect(std::memcmp(tokens + row * bytes, want.data(), bytes) == 0,
                 pairs ? "values" : "dequantised rows", row);
  if (!pairs) return;
  verdict.expect(std::memcmp(scales + row * groups, want_scales.data(), 4 * groups) == 0, "scales",
                 row);
}

inline void check_float8_outputs(World& world, const Truth& truth, const QuantizedTokens& known,
                                 bool expand, bool pairs, Verdict& verdict) {
  const Case& c = world.c();
  for (int r = 0; r < c.num_ranks; ++r) {
    world.use(r);
    const std::vector<char> tokens = (expand ? world.rank(r).tokens : world.rank(r).slots).take();
    const std::vector<float> scales = world.rank(r).scales.take();
    const auto num_rows = static_cast<int64_t>(truth.rows[r].size());
    parallel(expand ? world.capacity() : world.num_slots(), [&](int64_t row) {
      RowSource from;
      if (expand) {
        if (row >= num_rows && !c.zero_tail) return;
        if (row < num_rows) from = truth.rows[r][row];
      } else {
        const int source = static_cast<int>(row / c.num_tokens);
        const int token = static_cast<int>(row % c.num_tokens);
        if (is_kept(world, truth, source, token, r)) from = {source, token, 0};
      }
      check_float8_row(world, known, from, pairs, row, tokens.data(), scales.data(), verdict);
    });
  }
}

// After check_round(), along its inputs.
inline int64_t check_float8(World& world, bool pauses, const std::string& where) {
  Verdict verdict(where + ", float8");
  const Truth truth = make_truth(world, world.capacity());
  for (const bool power_of_two : {false, true}) {
    const QuantizedTokens known = quantize_tokens(world, power_of_two);
    for (const bool expand : {true, false}) {
      const bool pairs = expand != power_of_two;
      world.poison();
      launch_all(world, pauses,
                 [&](int r) { world.dispatch_float8(r, expand, pairs, power_of_two); });
      world.synchronise();
      check_float8_outputs(world, truth, known, expand, pairs, verdict);
      check_faults(world, truth, 1, verdict);
    }
  }
  for (int r = 0; r < world.num_ranks(); ++r) {
    verdict.expect(world.rank(r).rank->mailbox().error.kind == ErrorKind::kNone, "error record", r);
  }
  return verdict.wrong();
}

}  // namespace jax_ep::gpu::test
