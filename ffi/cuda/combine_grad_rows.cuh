// What both kernels of combine's gradient know of their entries and rows.
#pragma once

#include "cuda/combine_grad.h"
#include "cuda/messages.cuh"

namespace jax_ep::gpu {

// Lane k: what one token's entry k means to this rank.
struct GradEntry {
  int rank = -1;  // of its expert, -1 for none
};

__device__ inline GradEntry load_grad_entry(const CombineGradParams& p, int token) {
  const WindowShape& shape = p.op.layout.shape;
  if (lane_id() >= shape.num_experts_per_tok) return {};
  const int expert = p.topk_idx[int64_t{token} * shape.num_experts_per_tok + lane_id()];
  if (expert < 0 || expert >= shape.num_experts) return {};
  return {expert / shape.experts_per_rank()};
}

// Lane k: the row here of entry k of a message, and that row's weight.
struct GradRow {
  int row = -1;
  float weight = 0.0f;
};

__device__ inline GradRow load_grad_row(const CombineGradParams& p, MessageId id) {
  const int num_experts_per_tok = p.op.layout.shape.num_experts_per_tok;
  if (lane_id() >= num_experts_per_tok) return {};
  const int64_t message = int64_t{id.peer} * p.op.num_tokens + id.token;
  const int row = p.recv_rows[message * num_experts_per_tok + lane_id()];
  if (row < 0 || row >= p.capacity) return {};
  return {row, p.row_weights[row]};
}

}  // namespace jax_ep::gpu
