// The shapes that low-latency operations are checked with.
#pragma once

#include "cuda_ll_checks.h"
#include "cuda_ll_faults.h"

namespace jax_ep::gpu::test {

struct LlCase {
  Case c;
  LlMode mode;
};

inline std::vector<LlCase> ll_cases(int num_devices) {
  const std::vector<int> one{0};
  const std::vector<int> all = num_devices > 1 ? std::vector<int>{0, 1} : one;
  const RowType f32 = RowType::kFloat32;
  const RowType bf16 = RowType::kBFloat16;
  const RowType f16 = RowType::kFloat16;
  const LlMode rows{LlOutput::kRows, true};
  const LlMode compact{LlOutput::kRows, false};
  const LlMode values{LlOutput::kValues, true};
  const LlMode values_compact{LlOutput::kValues, false, true};
  const LlMode back{LlOutput::kDequantized, true, true};
  const LlMode back_compact{LlOutput::kDequantized, false};
  const LlMode in_memory{LlOutput::kRows, true, false, true};
  const LlMode compact_in_memory{LlOutput::kRows, false, false, true};
  std::vector<LlCase> cases{
      // name, ranks, devices, T, H, K, E, type, routing
      {ll_case("small", 2, all, 16, 256, 4, 16), rows},
      {ll_case("small compact", 2, all, 16, 256, 4, 16, bf16, Routing::kFaulty), compact},
      {ll_case("small fp8", 2, all, 16, 1024, 4, 16, bf16, Routing::kFaulty), values},
      {ll_case("one rank", 1, one, 40, 512, 4, 8, bf16, Routing::kFaulty), rows},
      {ll_case("one rank fp8", 1, one, 40, 520, 4, 8, f32), values_compact},
      {ll_case("no tokens", 2, all, 0, 256, 4, 16), rows},
      {ll_case("no tokens compact", 2, all, 0, 256, 4, 16), compact},
      {ll_case("no tokens fp8", 2, all, 0, 1024, 4, 16), back},
      {ll_case("one token", 2, all, 1, 8, 1, 2), compact},
      {ll_case("one token fp8", 2, all, 1, 8, 1, 2), values},
      {ll_case("7 tokens", 2, all, 7, 3584, 8, 60, f16, Routing::kFaulty), back},
      {ll_case("decode", 2, all, 128, 7168, 8, 256), compact},
      {ll_case("decode fp8", 2, all, 32, 7168, 8, 256), values},
      {ll_case("decode f32", 2, all, 33, 7168, 8, 64, f32, Routing::kFaulty), back_compact},
      {ll_case("odd channels", 2, all, 50, 1112, 6, 24, bf16, Routing::kFaulty), values_compact},
      {ll_case("odd f32 channels", 3, one, 50, 1124, 6, 24, f32), values},
      {ll_case("very wide", 2, all, 12, 40008, 6, 24, f16), rows},
      {ll_case("512 tokens", 2, all, 512, 1024, 8, 288), values_compact},
      {ll_case("top 22", 4, all, 70, 1024, 22, 60, bf16, Routing::kSkewed), compact},
      {ll_case("top 32", 2, all, 60, 1024, 32, 128, f16, Routing::kFaulty), back},
      {ll_case("empty ranks", 4, one, 48, 512, 8, 64, bf16, Routing::kSomeRanksEmpty), compact},
      {ll_case("one busy rank", 4, one, 48, 512, 8, 64, bf16, Routing::kOneRank), rows},
      {ll_case("dropping", 4, one, 48, 512, 8, 64, bf16, Routing::kFaulty), compact},
      {ll_case("device memory", 2, all, 48, 512, 8, 64, bf16, Routing::kFaulty), in_memory},
      {ll_case("device memory 2", 3, one, 300, 512, 8, 48), compact_in_memory},
      {ll_case("many experts", 2, all, 64, 256, 8, 20000), compact},
      {ll_case("odd experts", 3, one, 40, 512, 5, 393, bf16, Routing::kFaulty), compact},
      {ll_case("odd experts padded", 3, one, 40, 512, 5, 45), rows},
      {ll_case("virtual 2", 2, one, 128, 1024, 8, 256), rows},
      {ll_case("virtual 4", 4, one, 32, 1024, 8, 256), values},
      {ll_case("virtual 8", 8, one, 32, 1024, 8, 256, bf16, Routing::kFaulty), compact},
      {ll_case("8 on all", 8, all, 64, 1024, 8, 64, f16, Routing::kFaulty), rows},
      {ll_case("33 ranks", 33, one, 3, 64, 4, 66), rows},
  };
  for (LlCase& l : cases) {
    if (std::string(l.c.name) == "dropping") l.c.capacity = Capacity::kDropping;
    if (l.c.num_tokens == 7) l.c.tokens_per_epoch = 128;
  }
  return cases;
}

inline int64_t run_ll_case(const LlCase& l, uint64_t seed, int rounds, double timeout_s) {
  begin_case(l.c.name);
  step("making windows");
  LlWorld ll(l.c, l.mode, seed, timeout_s);
  int64_t bad = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string where = l.c.name + std::string(", round ") + std::to_string(round);
    bad += check_ll_round(ll, round % 2 == 1, round >= 2, where);
  }
  std::printf("%-20s %-5s %5.1f s\n", l.c.name, bad == 0 ? "ok" : "WRONG",
              Progress::instance().seconds_of_case());
  std::fflush(stdout);
  return bad;
}

inline int64_t run_ll_checks(uint64_t seed, int num_devices) {
  int64_t wrong = 0;
  for (const LlCase& l : ll_cases(num_devices)) wrong += run_ll_case(l, seed++, 4, 2.0);
  return wrong + run_ll_fault_checks(seed, num_devices);
}

// Few blocks and tokens, for tools that slow kernels down.
inline int64_t run_ll_small(uint64_t seed, int num_ranks) {
  int64_t wrong = 0;
  for (const LlOutput output : {LlOutput::kRows, LlOutput::kValues, LlOutput::kDequantized}) {
    for (const bool padded : {true, false}) {
      LlCase l{ll_case("small", num_ranks, {0}, 5, 264, 3, 4 * num_ranks, RowType::kBFloat16,
                       Routing::kFaulty),
               {output, padded}};
      l.c.num_sms = 2;
      wrong += run_ll_case(l, seed++, 4, 60.0);
    }
  }
  return wrong;
}

}  // namespace jax_ep::gpu::test
