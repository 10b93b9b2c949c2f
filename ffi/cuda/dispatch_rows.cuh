// What dispatch's bulk and plain kernels have in common: entries, their output rows, and the phases
// before and after the payload.
#pragma once

#include "cuda/dispatch.h"
#include "cuda/messages.cuh"
#include "cuda/placement.cuh"
#include "cuda/route.cuh"
#include "protocol/quantize.h"

namespace jax_ep::gpu {

// Lane k of a warp: where entry k of a token goes.
struct TokenEntry {
  int rank = -1;
  uint32_t route = kNoRoute;
  float weight = 0.0f;
};

// kRouted: along a routing of the program, of which nothing is trusted; else along the routes that
// the operation has worked out.
template <bool kRouted>
__device__ TokenEntry load_entry(const DispatchParams& p, int token) {
  const WindowShape& shape = p.op.layout.shape;
  if (lane_id() >= shape.num_experts_per_tok || token >= p.op.num_tokens) return {};
  const int64_t entry = int64_t{token} * shape.num_experts_per_tok + lane_id();
  if constexpr (kRouted) {
    const int expert = p.topk_idx[entry];
    const int index = p.row_index[entry];
    const float weight = p.topk_weights[entry];
    const bool possible =
        expert >= 0 && expert < shape.num_experts && index >= 0 && index < p.op.num_tokens;
    if (!possible) return {};
    const int rank = expert / shape.experts_per_rank();
    return {rank, pack_route(expert - rank * shape.experts_per_rank(), index), weight};
  } else {
    const SendRoute route = p.op.scratch.routes[entry];
    return {route.rank, route.route, p.topk_weights[entry]};
  }
}

// The output row of an entry from `source`, or -1 when it is dropped. Whatever arrived, the row
// lies in the output.
__device__ inline int output_row(const DispatchParams& p, const Placement& place, uint32_t route,
                                 int source) {
  const int expert = route_expert(route);
  if (route == kNoRoute || expert >= p.op.layout.shape.experts_per_rank()) return -1;
  const int row = place.bases[int64_t{expert} * p.op.num_ranks() + source] + route_index(route);
  return row >= 0 && row < p.capacity ? row : -1;
}

__device__ inline int64_t slot_of(const DispatchParams& p, MessageId id) {
  return int64_t{id.peer} * p.op.num_tokens + id.token;
}

// Lanes below K.
__device__ inline void record_row(const DispatchParams& p, MessageId id, int row, float weight) {
  const int num_experts_per_tok = p.op.layout.shape.num_experts_per_tok;
  if (lane_id() >= num_experts_per_tok) return;
  const int64_t slot = slot_of(p, id);
  p.recv_rows[slot * num_experts_per_tok + lane_id()] = row;
  if (row < 0) return;
  p.weights[row] = weight;
  if (p.row_map != nullptr) p.row_map[row] = static_cast<int32_t>(slot);
}

// The row of tokens that gets each lane's copy of a message, -1 for none: the entry's row or, when
// rows are not copied, once the message's slot.
__device__ inline int64_t target_row(const DispatchParams& p, MessageId id, int row) {
  if (p.row_map == nullptr) return row;
  const unsigned kept = __ballot_sync(kFullWarp, row >= 0);
  const bool leads = row >= 0 && (kept & lanes_below()) == 0;
  return leads ? slot_of(p, id) : -1;
}
// As an address, null for none; of rows that travel as they are.
__device__ inline char* copy_target(const DispatchParams& p, MessageId id, int row) {
  const int64_t to = target_row(p, id, row);
  return to >= 0 ? p.tokens + to * p.op.layout.shape.row_bytes : nullptr;
}

// The calling threads: rows [begin, end) of tokens become zeros.
__device__ inline void zero_rows(const DispatchParams& p, int64_t begin, int64_t end, int thread,
                                 int threads) {
  const int64_t row_bytes = p.output_row_bytes();
  char* to = p.tokens + begin * row_bytes;
  if (row_bytes % 16 == 0) {
    zero_vectors(to, (end - begin) * row_bytes / 16, thread, threads);
  } else {
    fill(reinterpret_cast<uint32_t*>(to), (end - begin) * row_bytes / 4, 0u, thread, threads);
  }
  if (p.scales == nullptr) return;
  const int groups = num_scales(p.hidden);
  fill(p.scales + begin * groups, (end - begin) * groups, 1.0f, thread, threads);
}

// A warp, for each message once its rows are known: a slot that no row maps to is zero.
__device__ inline void zero_unsent_slot(const DispatchParams& p, MessageId id, int row) {
  if (p.row_map == nullptr || __any_sync(kFullWarp, row >= 0)) return;
  zero_rows(p, slot_of(p, id), slot_of(p, id) + 1, lane_id(), kWarp);
}

__device__ inline PlacementArgs placement_args(const DispatchParams& p) {
  return {p.expert_alignment, p.capacity, p.group_sizes, p.valid_sizes, p.num_dropped};
}

__device__ inline Placement placement_in(const DispatchParams& p, char* shared) {
  const bool fits = p.plan.bases_offset >= 0;
  auto* bases =
      fits ? reinterpret_cast<int32_t*>(shared + p.plan.bases_offset) : p.op.scratch.row_bases;
  return {bases, bases + p.op.layout.shape.num_experts + 1, fits};
}

template <bool kRouted>
__device__ bool is_routing_block(const DispatchParams& p) {
  return !kRouted && static_cast<int>(blockIdx.x) < p.num_routing_blocks;
}
__device__ inline RouteArgs route_args(const DispatchParams& p, char* shared) {
  const bool fits = p.plan.workspace_offset >= 0;
  auto* workspace = fits ? reinterpret_cast<uint32_t*>(shared + p.plan.workspace_offset)
                         : p.op.scratch.route_workspace;
  return {p.topk_idx, p.sanitised_idx, workspace, fits, p.num_routing_blocks};
}

// All threads, before the operation begins.
template <bool kRouted>
__device__ void route_ahead(const DispatchParams& p, char* shared) {
  if (is_routing_block<kRouted>(p)) count_ahead(p.op, route_args(p, shared));
}

// All threads of a routing block. A call: inlined, it would take registers from warps that have
// their first rows on the way by now.
template <class Transport>
__device__ __noinline__ void route(const OpContext ctx, const DispatchParams& p, char* shared) {
  route_entries<Transport>(ctx, route_args(p, shared));
}

// Counts of all ranks as a routing has them.
struct GivenCounts {
  const DispatchParams& p;
  __device__ void collect(const OpContext& ctx, const Placement& place) const {
    const int num_local = ctx.op.layout.shape.experts_per_rank();
    const int num_words = ctx.num_ranks() * num_local;
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
      const int source = i / num_local;
      const int expert = i - source * num_local;
      const int32_t count = p.counts[int64_t{source} * ctx.op.layout.shape.num_experts +
                                     ctx.rank() * num_local + expert];
      const bool possible = count >= 0 && count <= ctx.op.num_tokens;
      place.bases[int64_t{expert} * ctx.num_ranks() + source] = possible ? count : 0;
    }
  }
};

// All threads, once the operation has begun: this block's share of the routes.
template <class Transport, bool kRouted>
__device__ void route_share(const OpContext& ctx, const DispatchParams& p, char* shared) {
  if (is_routing_block<kRouted>(p)) route<Transport>(ctx, p, shared);
}

// All threads. False when the operation is aborted; else this block knows all routes and all rows.
template <bool kRouted>
__device__ bool place_all_rows(const OpContext& ctx, const DispatchParams& p,
                               const Placement& place) {
  if constexpr (kRouted) {
    return place_rows(ctx, placement_args(p), place, 0, GivenCounts{p});
  } else {
    return place_rows(ctx, placement_args(p), place, p.num_routing_blocks);
  }
}

// The calling threads of one block: rows [begin, end), which hold no token.
__device__ inline void clear_rows(const DispatchParams& p, int64_t begin, int64_t end, bool zero,
                                  int thread, int threads) {
  const int32_t no_slot = p.op.num_ranks() * p.op.num_tokens;
  for (int64_t r = begin + thread; r < end; r += threads) {
    p.weights[r] = 0.0f;
    if (p.row_map != nullptr) p.row_map[r] = no_slot;
  }
  if (!zero || p.row_map != nullptr) return;
  zero_rows(p, begin, end, thread, threads);
}

// The calling threads of all blocks: rows that no token fills, between the experts and after the
// last.
__device__ inline void clear_unfilled_rows(const OpContext& ctx, const DispatchParams& p,
                                           const Placement& place, int thread, int threads) {
  const int num_local = ctx.op.layout.shape.experts_per_rank();
  const int64_t total = place.bases[int64_t{num_local} * ctx.num_ranks()];
  if (p.expert_alignment > 1) {
    for (int e = blockIdx.x; e < num_local; e += gridDim.x) {
      const ExpertSegment segment = segment_of(place, ctx.num_ranks(), e);
      clear_rows(p, segment.begin + segment.valid_size(p.capacity),
                 segment.begin + segment.group_size(p.capacity), true, thread, threads);
    }
  }
  // Past the last expert, in shares for each block in turn: small where whole rows are written.
  const int64_t share = p.zero_tail ? 8 : threads;
  for (int64_t r = total + blockIdx.x * share; r < p.capacity; r += gridDim.x * share) {
    clear_rows(p, r, min(r + share, p.capacity), p.zero_tail, thread, threads);
  }
}

// All threads of one block: what the outputs of an aborted operation hold.
__device__ inline void spoil_dispatch(const DispatchParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const WindowShape& shape = p.op.layout.shape;
  const int64_t entries = int64_t{p.op.num_tokens} * shape.num_experts_per_tok;
  const int64_t slots = int64_t{p.op.num_tokens} * shape.num_ranks;
  const bool copied = p.row_map == nullptr;
  const int64_t rows = copied ? p.capacity : slots;
  if (p.scales != nullptr) {
    constexpr uint32_t kNans = 0x7F7F7F7Fu;
    fill(reinterpret_cast<uint32_t*>(p.tokens), rows * p.hidden / 4, kNans, thread, threads);
    fill_nan(reinterpret_cast<char*>(p.scales), rows * num_scales(p.hidden) * 4, RowType::kFloat32);
  } else {
    fill_nan(p.tokens, rows * p.output_row_bytes(), p.row_type);
  }
  if (!copied) fill(p.row_map, p.capacity, static_cast<int32_t>(slots), thread, threads);
  fill_nan(reinterpret_cast<char*>(p.weights), p.capacity * 4, RowType::kFloat32);
  fill(p.group_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.valid_sizes, shape.experts_per_rank(), 0, thread, threads);
  fill(p.num_dropped, 1, 0, thread, threads);
  if (p.sanitised_idx != nullptr) fill(p.sanitised_idx, entries, -1, thread, threads);
  fill(p.recv_rows, entries * shape.num_ranks, -1, thread, threads);
}

}  // namespace jax_ep::gpu
