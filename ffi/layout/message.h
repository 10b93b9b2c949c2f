// The message: one token's row on its way to one rank, sent at most once per (token, rank).
//
//   offset                bytes            content
//   0                     row_bytes        the row (hidden * itemsize, a multiple of 16)
//   row_bytes             4                source token index, int32
//   row_bytes + 4         8 * K            route record: for each k {uint32 route, float32 weight}
//   ...                   to 16            padding
//
// `route` holds, for a k whose expert lives on the receiving rank, the expert's index there in the
// high 16 bits and, in the low 16 bits, the row's index among this source's rows of that expert.
// Every other k holds kNoRoute.
#pragma once

#include <cstdint>

#include "layout/host_device.h"

namespace jax_ep {

constexpr uint32_t kNoRoute = 0xFFFFFFFFu;
constexpr int kMaxExpertsPerTok = 32;
constexpr int kMaxLocalExperts = 65535;   // so that no route with a valid expert equals kNoRoute
constexpr int kMaxTokensPerRank = 65535;  // so that an index among a source's rows fits 16 bits

struct RouteEntry {
  uint32_t route;
  float weight;
};
static_assert(sizeof(RouteEntry) == 8, "the wire format fixes the route entry at 8 bytes");

JAX_EP_HD constexpr uint32_t pack_route(int local_expert, int index) {
  return (static_cast<uint32_t>(local_expert) << 16) | static_cast<uint32_t>(index);
}
JAX_EP_HD constexpr int route_expert(uint32_t route) { return static_cast<int>(route >> 16); }
JAX_EP_HD constexpr int route_index(uint32_t route) { return static_cast<int>(route & 0xFFFFu); }

JAX_EP_HD constexpr int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Of numbers that are not negative. One instruction on a GPU, where signed factors may take four.
JAX_EP_HD constexpr int64_t wide_product(int a, int b) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(a)) *
                              static_cast<uint32_t>(b));
}

struct MessageFormat {
  int64_t row_bytes;
  int num_experts_per_tok;

  JAX_EP_HD constexpr int64_t source_offset() const { return row_bytes; }
  JAX_EP_HD constexpr int64_t entry_offset(int k) const { return row_bytes + 4 + int64_t{8} * k; }
  JAX_EP_HD constexpr int64_t bytes() const {
    return align_up(entry_offset(num_experts_per_tok), 16);
  }
};

}  // namespace jax_ep
