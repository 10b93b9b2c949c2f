// What a waiter writes down when it gives up. Plain data: a kernel stores it to host-mapped memory.
#pragma once

#include <cstdint>

#include "protocol/signals.h"

namespace jax_ep {

// kUsage: this rank's own program began or ended an operation out of turn. kPeerLeft: a timeout
// that need not be waited for, since the peer's process is there no more.
enum class ErrorKind : uint32_t {
  kNone = 0,
  kTimeout = 1,
  kMismatch = 2,
  kUsage = 3,
  kPeerLeft = 4,
};

// The step of the protocol that a rank was waiting in.
enum class WaitFor : uint32_t {
  kStart = 0,   // a peer has not presented the operation
  kCredit = 1,  // a peer has not finished reading epoch - 2
  kTag = 2,     // no (epoch, tag) word
  kCount = 3,   // no (epoch, count) word
  kRow = 4,     // no arrival flag
};

constexpr const char* wait_name(WaitFor wait) {
  constexpr const char* kNames[] = {"its start", "its credit", "its tag", "its counts", "its rows"};
  return kNames[static_cast<int>(wait)];
}

struct ErrorRecord {
  ErrorKind kind;
  OpKind op;
  WaitFor wait;
  int32_t rank;  // who waited
  int32_t peer;  // for whom
  uint64_t epoch;
  uint64_t expected;
  uint64_t seen;
};

}  // namespace jax_ep
