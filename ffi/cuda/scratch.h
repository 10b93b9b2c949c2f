// The scratch of one rank: where each array of it lies in one block of device memory.
#pragma once

#include <cstdint>

#include "cuda/window.h"

namespace jax_ep::gpu {

// The largest expert_alignment for which combine_grad's marks cover every row.
constexpr int64_t kMaxAlignment = 4096;

struct ScratchLayout {
  int64_t routes;
  int64_t block_counts;
  int64_t route_workspace;
  int64_t row_bases;
  int64_t row_marks;
  int64_t row_mark_words;
  int64_t total_bytes;

  // max_tokens: the most that one operation brings.
  static ScratchLayout make(const WindowShape& shape, int max_tokens);

  Scratch at(char* memory, RankState* state) const;
};

}  // namespace jax_ep::gpu
