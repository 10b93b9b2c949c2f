// The CUDA kernels without JAX: checks against the oracle, faults, captured graphs, timings.
//   cuda_harness check [seed]   virtual ranks on GPU 0, and on two GPUs where there are two
//   cuda_harness small [seed] [ranks]   tiny cases on one GPU, for tools that slow kernels down
//   cuda_harness time           2 ranks on 2 GPUs, T = 4096 and 1024, H = 7168, K = 8, E = 256
//   cuda_harness ll-check [seed], ll-small [seed] [ranks], ll-time     likewise, low latency; where
//                               there is one GPU alone, the times of two ranks on it
// Exit status 0: nothing was wrong.
#include "cuda_checks.h"
#include "cuda_faults.h"
#include "cuda_float8.h"
#include "cuda_ll_cases.h"
#include "cuda_ll_timing.h"
#include "cuda_notify.h"
#include "cuda_timing.h"
#include "cuda_unexpanded.h"

namespace jax_ep::gpu::test {
namespace {

std::vector<Case> cases(int num_devices) {
  using R = Routing;
  using C = Capacity;
  const std::vector<int> one{0};
  const std::vector<int> all = num_devices > 1 ? std::vector<int>{0, 1} : one;
  const RowType f32 = RowType::kFloat32;
  const RowType bf16 = RowType::kBFloat16;
  const RowType f16 = RowType::kFloat16;
  return {
      // name, ranks, devices, T, H, K, E, type, C, capacity, alignment, zero_tail, routing, bulk
      {"small", 2, all, 64, 256, 4, 16, bf16},
      {"one rank", 1, one, 100, 512, 4, 8, bf16},
      {"one rank, plain", 1, one, 100, 512, 4, 8, f32, 0, C::kWorst, 4, true, R::kFaulty, false},
      {"wide", 2, all, 333, 7168, 8, 256, bf16, 0, C::kTight},
      {"wide f32, parts", 2, all, 96, 7168, 8, 64, f32, 0, C::kWorst, 8, false},
      {"very wide", 2, all, 40, 40008, 6, 24, f16, 0, C::kDropping},
      {"no tokens", 2, all, 0, 256, 4, 16, bf16},
      {"one token", 2, all, 1, 8, 1, 2, bf16},
      {"faults", 2, all, 200, 1024, 8, 32, f16, 0, C::kWorst, 1, true, R::kFaulty},
      {"dropping", 2, all, 300, 1024, 8, 32, bf16, 0, C::kDropping, 16, true, R::kFaulty},
      {"chunks", 2, all, 500, 512, 6, 32, bf16, 64},
      {"chunks, odd", 4, all, 301, 96, 5, 40, f32, 23, C::kDropping, 4, true, R::kFaulty},
      {"empty ranks", 4, all, 128, 512, 8, 64, bf16, 0, C::kWorst, 1, true, R::kSomeRanksEmpty},
      {"one busy rank", 4, all, 128, 512, 8, 64, bf16, 0, C::kTight, 1, false, R::kOneRank},
      {"top 22", 4, all, 128, 1024, 22, 512, bf16, 48, C::kWorst, 1, true, R::kSkewed},
      {"top 32", 2, all, 96, 7168, 32, 128, bf16, 0, C::kTight, 1, true, R::kFaulty},
      {"many experts", 2, all, 256, 256, 8, 20000, bf16, 0, C::kWorst, 1, false},
      {"virtual 2", 2, one, 512, 2048, 8, 256, bf16, 0, C::kTight},
      {"virtual 4", 4, one, 256, 2048, 8, 256, bf16, 96, C::kTight},
      {"virtual 8", 8, one, 200, 1024, 8, 256, bf16, 0, C::kWorst, 1, false},
      {"8 on all", 8, all, 256, 1024, 8, 64, f16, 100, C::kDropping, 8, true, R::kFaulty},
      {"33 ranks", 33, one, 40, 64, 4, 66, bf16, 16, C::kWorst, 1, false},
      {"plain", 2, all, 333, 1024, 8, 64, bf16, 0, C::kWorst, 8, true, R::kFaulty, false},
      {"plain, chunks", 4, all, 300, 520, 6, 48, f32, 40, C::kDropping, 1, true, R::kFaulty, false},
      {"plain, top 22", 4, one, 100, 512, 22, 64, f16, 0, C::kTight, 1, false, R::kUniform, false},
  };
}

// Few blocks and tokens, all three ways to move rows.
std::vector<Case> small_cases(int num_ranks) {
  using R = Routing;
  using C = Capacity;
  Case bulk{"bulk", num_ranks, {0}, 12,   256,       3, 4 * num_ranks, RowType::kBFloat16,
            5,      C::kWorst, 4,   true, R::kFaulty};
  bulk.num_sms = 4;
  Case plain = bulk;
  plain.name = "plain";
  plain.bulk = false;
  Case wide = bulk;
  wide.name = "wide";
  wide.hidden = 9000;
  wide.capacity = C::kDropping;
  return {bulk, plain, wide};
}

int64_t run_checks(const std::vector<Case>& table, uint64_t seed, int rounds, double timeout_s) {
  int64_t wrong = 0;
  for (const Case& c : table) {
    World world(c, seed++, timeout_s);
    int64_t bad = 0;
    for (int round = 0; round < rounds; ++round) {
      const std::string where = c.name + std::string(", round ") + std::to_string(round);
      const bool pauses = round % 2 == 1;
      bad += check_round(world, pauses, where);
      bad += check_unexpanded(world, pauses, where);
      bad += check_float8(world, pauses, where);
      bad += check_notify(world, pauses, where);
    }
    std::printf("%-18s %s\n", c.name, bad == 0 ? "ok" : "WRONG");
    std::fflush(stdout);
    wrong += bad;
  }
  return wrong;
}

}  // namespace
}  // namespace jax_ep::gpu::test

int main(int argc, char** argv) {
  using namespace jax_ep::gpu::test;
  const std::string mode = argc > 1 ? argv[1] : "check";
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  int num_devices = 0;
  int64_t wrong = 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was printed is known even if we are killed
  try {
    check(cudaGetDeviceCount(&num_devices), "count devices");
    std::printf("%s: %d devices, seed %llu\n", mode.c_str(), num_devices,
                static_cast<unsigned long long>(seed));
    if (mode == "small") {
      wrong = run_checks(small_cases(argc > 3 ? std::atoi(argv[3]) : 2), seed, 2, 60.0);
    } else if (mode == "ll-check" || mode == "ll-time") {
      Progress::instance().limit_seconds(40);  // a hang must cost no more
      wrong =
          mode == "ll-check" ? run_ll_checks(seed, num_devices) : run_ll_timings(seed, num_devices);
    } else if (mode == "ll-small") {
      wrong = run_ll_small(seed, argc > 3 ? std::atoi(argv[3]) : 2);
    } else if (mode == "check") {
      wrong = run_checks(cases(num_devices), seed, 4, 2.0);
      wrong += run_fault_checks(seed, num_devices);
      wrong += run_notify_faults(seed);
    } else {
      wrong = run_timings(seed, num_devices);
    }
  } catch (const std::exception& error) {
    std::printf("ERROR %s\n", error.what());
    return 1;
  }
  std::printf("%lld wrong\n", static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}
