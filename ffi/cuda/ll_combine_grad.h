// The gradient of low-latency combine. The kernel of high-throughput combine would leave payload
// where low latency needs sentinels, so that a low-latency buffer has this one. It sends and
// receives in one launch, since the halves of an operation have no gradients.
#pragma once

#include "cuda/combine_grad.h"
#include "cuda/ll_window.h"

namespace jax_ep::gpu {

// `grad.plan` is not used. With the padded layout, capacity is E_l * R * T and zero_tail is true:
// the rows past an expert's count get zeros.
struct LlCombineGradParams {
  CombineGradParams grad;
  LlTurn turn;  // fused
  int num_blocks;
};

cudaError_t prepare_ll_combine_grad();

int plan_ll_combine_grad(int num_tokens, int num_sms);

cudaError_t launch_ll_combine_grad(const LlCombineGradParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
