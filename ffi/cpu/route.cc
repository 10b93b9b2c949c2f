#include "cpu/route.h"

namespace jax_ep {

namespace {

void clear_entries(RankContext& context, int num_tokens) {
  const size_t num_entries =
      static_cast<size_t>(num_tokens) * context.window.layout.shape.num_experts_per_tok;
  context.routes.assign(num_entries, kNoRoute);
  context.owners.assign(num_entries, -1);
}

void set_entry(RankContext& context, int64_t entry, int expert, int index) {
  const int experts_per_rank = context.window.layout.shape.experts_per_rank();
  const int owner = expert / experts_per_rank;
  context.owners[entry] = owner;
  context.routes[entry] = pack_route(expert - owner * experts_per_rank, index);
}

}  // namespace

DataFault route_tokens(RankContext& context, const int32_t* topk_idx, int num_tokens,
                       int32_t* clean_topk_idx) {
  const WindowShape& shape = context.window.layout.shape;
  const int topk = shape.num_experts_per_tok;
  DataFault faults;
  context.counts.assign(shape.num_experts, 0);
  clear_entries(context, num_tokens);
  for (int token = 0; token < num_tokens; ++token) {
    const int32_t* experts = topk_idx + static_cast<int64_t>(token) * topk;
    for (int k = 0; k < topk; ++k) {
      const int64_t entry = static_cast<int64_t>(token) * topk + k;
      RouteFault fault;
      const int expert = sanitised_expert(experts, k, shape.num_experts, &fault);
      clean_topk_idx[entry] = expert;
      if (fault != RouteFault::kNone && faults.count++ == 0) {
        faults = {1, fault, token, k, experts[k]};
      }
      if (expert >= 0) set_entry(context, entry, expert, context.counts[expert]++);
    }
  }
  return faults;
}

void adopt_entries(RankContext& context, const GivenRoute& route, const int32_t* topk_idx,
                   int num_tokens) {
  const WindowShape& shape = context.window.layout.shape;
  clear_entries(context, num_tokens);
  const auto num_entries = static_cast<int64_t>(context.routes.size());
  for (int64_t entry = 0; entry < num_entries; ++entry) {
    const int32_t expert = topk_idx[entry];
    const int32_t index = route.row_index[entry];
    const bool possible =
        expert >= 0 && expert < shape.num_experts && index >= 0 && index < num_tokens;
    if (possible) set_entry(context, entry, expert, index);
  }
}

void adopt_counts(RankContext& context, const GivenRoute& route, int num_tokens) {
  const WindowShape& shape = context.window.layout.shape;
  const int experts_per_rank = shape.experts_per_rank();
  context.received.resize(static_cast<size_t>(experts_per_rank) * shape.num_ranks);
  for (int source = 0; source < shape.num_ranks; ++source) {
    const int32_t* counts = route.counts + static_cast<int64_t>(source) * shape.num_experts +
                            context.window.rank * experts_per_rank;
    for (int expert = 0; expert < experts_per_rank; ++expert) {
      const bool possible = counts[expert] >= 0 && counts[expert] <= num_tokens;
      context.received[expert * shape.num_ranks + source] = possible ? counts[expert] : 0;
    }
  }
}

}  // namespace jax_ep
