// The life of a stress program: PROGRAM SEED EPOCHS. One fresh world after another, until enough
// epochs have passed or something was found.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "stress_report.h"

namespace jax_ep::stress {

// run_world: (Random&) -> epochs passed, all channels together. Returns the exit status.
template <class RunWorld>
int run_worlds(int argc, char** argv, RunWorld run_world) {
  if (argc != 3) {
    std::printf("usage: %s SEED EPOCHS\n", argv[0]);
    return 2;
  }
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const int64_t wanted = std::strtoll(argv[2], nullptr, 10);
  Random random(seed);
  int64_t epochs = 0;
  int worlds = 0;
  for (; epochs < wanted && !failures.any(); ++worlds) epochs += run_world(random);
  std::printf("seed %llu: %lld epochs in %d worlds\n", static_cast<unsigned long long>(seed),
              static_cast<long long>(epochs), worlds);
  return failures.any() ? 1 : 0;
}

}  // namespace jax_ep::stress
