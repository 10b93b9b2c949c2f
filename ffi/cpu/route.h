// Where each of a rank's entries goes, on CPU: worked out from topk_idx, or taken over from a
// routing that an earlier operation worked out.
#pragma once

#include <cstdint>

#include "cpu/rank_context.h"

namespace jax_ep {

// A routing as programs hold it. Nothing in it is trusted to stay in range.
struct GivenRoute {
  const int32_t* row_index =
      nullptr;                      // [T, K], index among this rank's rows for the entry's expert
  const int32_t* counts = nullptr;  // [R, E], rows of every source for every expert

  bool present() const { return counts != nullptr; }
};

// Writes topk_idx with faults replaced by -1 and fills the context's routes, owners and counts.
// Returns the faults met.
DataFault route_tokens(RankContext& context, const int32_t* topk_idx, int num_tokens,
                       int32_t* clean_topk_idx);

// Fills routes and owners from a given routing; entries out of range are taken for none.
void adopt_entries(RankContext& context, const GivenRoute& route, const int32_t* topk_idx,
                   int num_tokens);

// Fills the counts received by this rank; impossible ones are taken for none.
void adopt_counts(RankContext& context, const GivenRoute& route, int num_tokens);

}  // namespace jax_ep
