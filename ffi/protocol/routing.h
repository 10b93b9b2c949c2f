// Routing: which rank and which row each (token, k) goes to. Deterministic: it depends on topk_idx
// alone, rows of one expert are ordered by source rank, then token.
#pragma once

#include <cstdint>

#include "layout/host_device.h"
#include "layout/message.h"

namespace jax_ep {

enum class RouteFault : int { kNone, kOutOfRange, kDuplicate };

// The expert of entry k of one token's top-k, or -1 for "no expert". Values outside [-1, E) and
// later duplicates count as -1 and are faults of the data.
JAX_EP_HD inline int sanitised_expert(const int32_t* topk, int k, int num_experts,
                                      RouteFault* fault) {
  const int32_t expert = topk[k];
  *fault = RouteFault::kNone;
  if (expert == -1) return -1;
  if (expert < -1 || expert >= num_experts) {
    *fault = RouteFault::kOutOfRange;
    return -1;
  }
  for (int j = 0; j < k; ++j) {
    if (topk[j] == expert) {
      *fault = RouteFault::kDuplicate;
      return -1;
    }
  }
  return expert;
}

// Where one expert's rows lie in the expert-major output.
struct ExpertSegment {
  int64_t begin;        // first row
  int64_t true_rows;    // rows that were sent for this expert
  int64_t padded_rows;  // true_rows rounded up to the expert alignment

  JAX_EP_HD int group_size(int64_t capacity) const { return clipped(padded_rows, capacity); }
  JAX_EP_HD int valid_size(int64_t capacity) const { return clipped(true_rows, capacity); }

 private:
  JAX_EP_HD int clipped(int64_t rows, int64_t capacity) const {
    const int64_t end = begin + rows < capacity ? begin + rows : capacity;
    return end > begin ? static_cast<int>(end - begin) : 0;
  }
};

// Turns one expert's counts per source into row bases, in place, and returns its segment.
// counts: [R], rows from each source. Add an index to a base in 64 bits. A corrupted count is
// clamped to the tokens a rank can hold, so that bases stay in range whatever arrived.
JAX_EP_HD inline ExpertSegment place_expert(int32_t* counts, int num_ranks, int max_rows_per_source,
                                            int64_t begin, int64_t alignment) {
  int64_t next = begin;
  for (int source = 0; source < num_ranks; ++source) {
    int32_t count = counts[source];
    if (count < 0) count = 0;
    if (count > max_rows_per_source) count = max_rows_per_source;
    // A base beyond any capacity stays beyond it, and never wraps.
    counts[source] = static_cast<int32_t>(next < INT32_MAX ? next : INT32_MAX);
    next += count;
  }
  const int64_t rows = next - begin;
  // A division in 64 bits, for every expert, is worth avoiding on GPUs.
  return {begin, rows, alignment == 1 ? rows : align_up(rows, alignment)};
}

}  // namespace jax_ep
