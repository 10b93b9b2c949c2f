// Notify: all ranks learn how many rows every rank has for every expert, and the host learns it
// while the device goes on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/window.h"
#include "protocol/notice.h"

namespace jax_ep::gpu {

// How one launch uses its multiprocessors.
struct NotifyPlan {
  int num_blocks;          // the last of them speaks to peers and host
  int num_routing_blocks;  // the first of them; all of one block
  bool in_shared;          // the workspace of a routing block
  int64_t shared_bytes;
};

// Shapes: T tokens and K experts per token of this rank, R ranks, E experts. The operation takes
// one epoch, whatever T is.
struct NotifyParams {
  Operation op;
  NotifyPlan plan;
  const int32_t* topk_idx;  // [T, K]
  const uint32_t* ticket;   // []; kNoTicket: the host does not wait
  int32_t* sanitised_idx;   // [T, K] topk_idx with -1 for entries that are no expert
  int32_t* row_index;       // [T, K] place among this rank's entries for the expert; -1 for none
  int32_t* counts;          // [R, E]
  DeviceWords counters;     // this rank's, where the host reads
};

// Loads the kernel on the current device and lifts its shared memory limit.
cudaError_t prepare_notify();

NotifyPlan plan_notify(const WindowShape& shape, int num_tokens, int num_sms,
                       const DeviceLimits& limits);

cudaError_t launch_notify(const NotifyParams& given, cudaStream_t stream);

}  // namespace jax_ep::gpu
