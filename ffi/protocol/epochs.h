// Epochs, parity and credits: who may write which buffer when.
#pragma once

#include <cstdint>

#include "layout/host_device.h"
#include "layout/window_layout.h"

namespace jax_ep {

// Epochs count from 1, so that a zeroed window holds no valid flag and a zeroed credit says "epoch
// 0 was read", which lets epochs 1 and 2 be written at once.
constexpr uint64_t kFirstEpoch = 1;

JAX_EP_HD constexpr int parity_of(uint64_t epoch) { return static_cast<int>(epoch & 1u); }

// A sender may write epoch e into a buffer once its reader has finished epoch e - 2, which used it.
JAX_EP_HD constexpr bool may_write(uint64_t epoch, uint64_t credit) {
  return credit + kNumBuffers >= epoch;
}

// An operation on T tokens takes this many epochs, also when it has no tokens: every rank signals
// every rank in every epoch.
JAX_EP_HD constexpr int num_epochs(int num_tokens, int tokens_per_epoch) {
  return num_tokens <= tokens_per_epoch ? 1
                                        : (num_tokens + tokens_per_epoch - 1) / tokens_per_epoch;
}

struct TokenRange {
  int begin;
  int end;
  JAX_EP_HD constexpr int size() const { return end - begin; }
};

// Tokens that chunk `chunk` of an operation carries.
JAX_EP_HD constexpr TokenRange chunk_tokens(int num_tokens, int tokens_per_epoch, int chunk) {
  const int64_t begin = static_cast<int64_t>(chunk) * tokens_per_epoch;
  const int64_t end = begin + tokens_per_epoch;
  return {static_cast<int>(begin < num_tokens ? begin : num_tokens),
          static_cast<int>(end < num_tokens ? end : num_tokens)};
}

}  // namespace jax_ep
