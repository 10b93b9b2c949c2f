#include <algorithm>

#include "cuda/placement.cuh"
#include "cuda/route.cuh"
#include "cuda/scratch.h"

namespace jax_ep::gpu {

namespace {

class Offsets {
 public:
  int64_t take(int64_t bytes) {
    const int64_t offset = used_;
    used_ += align_up(bytes, 128);
    return offset;
  }
  int64_t used() const { return used_; }

 private:
  int64_t used_ = 0;
};

}  // namespace

ScratchLayout ScratchLayout::make(const WindowShape& shape, int max_tokens) {
  const int64_t tokens = max_tokens;
  const int num_local = shape.experts_per_rank();
  // Low latency's segments are padded, the others aligned.
  const int64_t most_rows =
      shape.records ? tokens * shape.num_ranks * num_local
                    : tokens * shape.num_ranks * std::min(shape.num_experts_per_tok, num_local) +
                          int64_t{num_local} * kMaxAlignment;
  ScratchLayout layout{};
  Offsets offsets;
  layout.routes = offsets.take(tokens * shape.num_experts_per_tok * int64_t{sizeof(SendRoute)});
  layout.block_counts = offsets.take(int64_t{kMaxRoutingBlocks} * shape.num_experts * 8);
  layout.route_workspace = offsets.take(4 * route_workspace_words(shape));
  layout.row_bases = offsets.take(Placement::words(shape.num_experts, num_local) * 4);
  layout.row_mark_words = (most_rows + 31) / 32;
  layout.row_marks = offsets.take(layout.row_mark_words * 4);
  layout.total_bytes = offsets.used();
  return layout;
}

Scratch ScratchLayout::at(char* memory, RankState* state) const {
  return {state,
          reinterpret_cast<SendRoute*>(memory + routes),
          reinterpret_cast<uint64_t*>(memory + block_counts),
          reinterpret_cast<uint32_t*>(memory + route_workspace),
          reinterpret_cast<int32_t*>(memory + row_bases),
          reinterpret_cast<uint32_t*>(memory + row_marks),
          row_mark_words};
}

}  // namespace jax_ep::gpu
