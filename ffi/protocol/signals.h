// The words that ranks signal each other with. Each has one writer and carries its epoch, so
// nothing is cleared between epochs: a stale word never compares equal.
#pragma once

#include <cstdint>

#include "layout/host_device.h"

namespace jax_ep {

enum class Arrival { kPending, kAbsent, kArrived };

// Flag of a slot in epoch e: 2e for "nothing for you", 2e + 1 for "arrived", modulo 2^32.
JAX_EP_HD constexpr uint32_t arrival_flag(uint64_t epoch, bool arrived) {
  return static_cast<uint32_t>(2 * epoch) + (arrived ? 1u : 0u);
}
JAX_EP_HD constexpr Arrival read_arrival(uint32_t flag, uint64_t epoch) {
  if (flag == arrival_flag(epoch, true)) return Arrival::kArrived;
  if (flag == arrival_flag(epoch, false)) return Arrival::kAbsent;
  return Arrival::kPending;
}

// Counts and tags travel as (epoch, value) in one 64-bit word: the value cannot be read too early.
JAX_EP_HD constexpr uint64_t epoch_word(uint64_t epoch, uint32_t value) {
  return (epoch << 32) | value;
}
JAX_EP_HD constexpr bool word_is_of(uint64_t word, uint64_t epoch) {
  return static_cast<uint32_t>(word >> 32) == static_cast<uint32_t>(epoch);
}
JAX_EP_HD constexpr uint32_t word_value(uint64_t word) { return static_cast<uint32_t>(word); }

enum class OpKind : uint32_t { kDispatch = 1, kCombine = 2, kCombineGrad = 3, kNotify = 4 };

constexpr const char* op_name(OpKind op) {
  switch (op) {
    case OpKind::kDispatch:
      return "dispatch";
    case OpKind::kCombine:
      return "combine";
    case OpKind::kCombineGrad:
      return "combine_grad";
    case OpKind::kNotify:
      return "notify";
  }
  return "unknown";
}

// What all ranks of one operation must agree on.
struct OpTag {
  OpKind op;
  uint32_t num_tokens;
  uint32_t variant;  // dtype and flags
  uint64_t site;     // call site where one process traces for all ranks, else 0
};

JAX_EP_HD constexpr uint32_t mix_bits(uint32_t hash, uint32_t value) {
  hash ^= value;
  hash *= 0x85EBCA6Bu;
  hash ^= hash >> 13;
  hash *= 0xC2B2AE35u;
  return hash ^ (hash >> 16);
}
JAX_EP_HD constexpr uint32_t tag_value(const OpTag& tag) {
  uint32_t hash = mix_bits(0x9E3779B9u, static_cast<uint32_t>(tag.op));
  hash = mix_bits(hash, tag.num_tokens);
  hash = mix_bits(hash, tag.variant);
  hash = mix_bits(hash, static_cast<uint32_t>(tag.site));
  return mix_bits(hash, static_cast<uint32_t>(tag.site >> 32));
}

}  // namespace jax_ep
