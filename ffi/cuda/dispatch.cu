#include <algorithm>

#include "cuda/dispatch.h"
#include "cuda/dispatch_bulk.cuh"
#include "cuda/dispatch_float8.cuh"
#include "cuda/float8_rows.h"
#include "cuda/launch.h"
#include "cuda/row_exchange.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kMaxThreads = 512;  // more would leave a thread too few registers
constexpr int kPlainThreads = 512;
constexpr int kHelpers = 4;

// ---- The kernels.

template <class Transport, bool kRouted, bool kPacked>
__global__ void __launch_bounds__(kMaxThreads, 1)
    dispatch_bulk_kernel(const __grid_constant__ DispatchParams p) {
#if defined(JAX_EP_BULK_COPY)
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = dispatch_bulk<Transport, kRouted, kPacked>(ctx, p, shared);
  finish_operation(ctx, begun, [&] { spoil_dispatch(p); });
#endif
}

template <bool kRouted>
class PlainDispatch {
 public:
  using Entry = TokenEntry;
  __device__ PlainDispatch(const OpContext& ctx, const DispatchParams& p, const Placement& place)
      : ctx_(ctx), p_(p), place_(place) {}

  __device__ Entry load(int token) const { return load_entry<kRouted>(p_, token); }
  __device__ const char* source_row(int token) const {
    return p_.x + int64_t{token} * p_.op.layout.shape.row_bytes;
  }
  __device__ int64_t message_bytes() const { return p_.op.layout.shape.message().bytes(); }
  __device__ void write_record(char* slot, int token, const Entry& entry, int rank) const {
    const MessageFormat format = p_.op.layout.shape.message();
    if (lane_id() == 0) *reinterpret_cast<int32_t*>(slot + format.source_offset()) = token;
    if (lane_id() >= p_.op.layout.shape.num_experts_per_tok) return;
    auto* words = reinterpret_cast<uint32_t*>(slot + format.entry_offset(lane_id()));
    words[0] = entry.rank == rank ? entry.route : kNoRoute;
    words[1] = __float_as_uint(entry.weight);
  }
  __device__ void keep(int token, const Entry& entry) const {
    const uint32_t route = entry.rank == ctx_.rank() ? entry.route : kNoRoute;
    expand(source_row(token), {ctx_.rank(), token}, route, entry.weight);
  }
  __device__ void receive(const char* message, MessageId id) const {
    uint32_t route = kNoRoute;
    float weight = 0.0f;
    if (lane_id() < p_.op.layout.shape.num_experts_per_tok) {
      const int64_t offset = p_.op.layout.shape.message().entry_offset(lane_id());
      const auto* words = reinterpret_cast<const uint32_t*>(message + offset);
      route = load_relaxed<kDeviceScope>(words);
      weight = __uint_as_float(load_relaxed<kDeviceScope>(words + 1));
    }
    expand(message, id, route, weight);
  }
  __device__ void absent(MessageId id) const {
    record_row(p_, id, -1, 0.0f);
    zero_unsent_slot(p_, id, -1);
  }

 private:
  __device__ void expand(const char* from, MessageId id, uint32_t route, float weight) const {
    const int row = output_row(p_, place_, route, id.peer);
    if (p_.quantized()) {
      store_packed_row<Packed::kGlobal>(p_, id, row, from);
    } else {
      char* target = copy_target(p_, id, row);
      copy_row(from, p_.op.layout.shape.row_bytes, target,
               __ballot_sync(kFullWarp, target != nullptr));
    }
    record_row(p_, id, row, weight);
    zero_unsent_slot(p_, id, row);
  }

  const OpContext& ctx_;
  const DispatchParams& p_;
  const Placement& place_;
};

template <class Transport, bool kRouted>
__global__ void __launch_bounds__(kPlainThreads, 1)
    dispatch_plain_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  route_ahead<kRouted>(p, shared);
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    const Placement place = placement_in(p, shared);
    route_share<Transport, kRouted>(ctx, p, shared);
    if (place_all_rows<kRouted>(ctx, p, place)) {
      PlainDispatch<kRouted> work(ctx, p, place);
      exchange_rows<Transport>(ctx, work, p.plan.senders);
      clear_unfilled_rows(ctx, p, place, threadIdx.x, blockDim.x);
    }
  }
  finish_operation(ctx, begun, [&] { spoil_dispatch(p); });
}

// ---- How a launch uses the device.

struct Warps {
  int senders;
  int receivers;
};

// Rows of 14 KB: on few multiprocessors each needs more rows in flight to fill its share of the
// link; on many, more rows in flight only queue (measured on 2 x H200: 4, 3 and 2 sender warps are
// best at up to 32, 48 and 64 blocks, 1 at 132). Shorter rows need more warps for the same bytes.
Warps preferred_warps(int num_ranks, int num_blocks, int64_t part_bytes) {
  const int scale = static_cast<int>(std::clamp<int64_t>(14336 / part_bytes, 1, 2));
  const int senders = num_blocks <= 32 ? 4 : num_blocks <= 56 ? 3 : num_blocks <= 96 ? 2 : 1;
  if (num_ranks == 1) return {6, 0};
  return {std::min(6, senders * scale), 3 * scale};
}

int64_t stage_bytes(const WindowShape& shape, int64_t part_bytes) {
  const int64_t record_bytes = shape.message().bytes() - shape.message().source_offset();
  const int most_records = std::max(1, std::min(shape.num_experts_per_tok, shape.num_ranks - 1));
  return align_up(align_up(part_bytes, 128) + most_records * record_bytes, 128);
}

// With a sender and a receiver.
bool whole_rows_fit(const WindowShape& shape, int64_t max_shared_bytes) {
  constexpr int64_t kOtherThings = 49152;
  return 2 * kStages * stage_bytes(shape, shape.row_bytes) + kOtherThings <= max_shared_bytes;
}

void plan_bulk(const WindowShape& shape, int64_t max_shared_bytes, bool whole_rows,
               DispatchPlan* plan) {
  const int64_t most_part_bytes = whole_rows ? shape.row_bytes : 16384;
  plan->num_parts = static_cast<int>((shape.row_bytes + most_part_bytes - 1) / most_part_bytes);
  plan->part_bytes = align_up((shape.row_bytes + plan->num_parts - 1) / plan->num_parts, 128);
  plan->stage_bytes = stage_bytes(shape, plan->part_bytes);

  const int64_t workspace = 4 * route_workspace_words(shape);
  const int64_t bases = 4 * Placement::words(shape.num_experts, shape.experts_per_rank());
  const int64_t bases_taken = bases <= 32768 ? align_up(bases, 128) : 0;
  constexpr int64_t kSmallThings = 8192;  // outboxes, barriers, static shared memory
  const int64_t room = max_shared_bytes - kSmallThings - bases_taken;
  Warps warps = preferred_warps(shape.num_ranks, plan->num_blocks, plan->part_bytes);
  while ((warps.senders + warps.receivers) * kStages * plan->stage_bytes > room) {
    int& larger =
        warps.receivers > 1 && warps.receivers >= warps.senders ? warps.receivers : warps.senders;
    --larger;
  }
  plan->senders = warps.senders;
  plan->receivers = warps.receivers;
  plan->helpers = kHelpers;
  // Measured on 2 x H200: faster with 24 and 32 blocks, slower from 48 on.
  plan->receive_ahead = plan->num_blocks <= 40;

  SharedLayout layout(max_shared_bytes - kSmallThings / 2);
  layout.take(warps.senders * kStages * plan->stage_bytes);
  const int64_t receiver_stages = warps.receivers * kStages * plan->stage_bytes;
  // The route is done before anything is received: its workspace lies over the receivers' stages.
  plan->workspace_offset = layout.used();
  if (workspace <= receiver_stages) {
    layout.take(receiver_stages);
  } else {
    plan->workspace_offset = layout.take_if_room(workspace);
    if (plan->workspace_offset < 0) layout.take(receiver_stages);
  }
  plan->bases_offset = bases_taken > 0 ? layout.take(bases) : -1;
  plan->outbox_offset = layout.take(warps.senders * static_cast<int64_t>(sizeof(Outbox)));
  plan->barrier_offset = layout.take(8 * kStages * (warps.senders + warps.receivers));
  plan->shared_bytes = layout.used();
}

void plan_plain(const WindowShape& shape, int64_t max_shared_bytes, DispatchPlan* plan) {
  SharedLayout layout(max_shared_bytes - 8192);
  plan->workspace_offset = layout.take_if_room(4 * route_workspace_words(shape));
  plan->bases_offset =
      layout.take_if_room(4 * Placement::words(shape.num_experts, shape.experts_per_rank()));
  plan->shared_bytes = layout.used();
  const int warps = kPlainThreads / kWarp;
  plan->senders = shape.num_ranks == 1 ? warps : warps / 2;
  plan->receivers = warps - plan->senders;
}

DispatchPlan make_plan(const WindowShape& shape, int num_sms, const DeviceLimits& limits,
                       bool whole_rows) {
  DispatchPlan plan{};
  plan.bulk = !GroupTransport::kPuts && limits.bulk_copy &&
              (!whole_rows || whole_rows_fit(shape, limits.max_shared_bytes));
  plan.num_blocks = num_sms;
  if (plan.bulk) {
    plan_bulk(shape, limits.max_shared_bytes, whole_rows, &plan);
  } else {
    plan_plain(shape, limits.max_shared_bytes, &plan);
  }
  // With more experts than shared memory holds, one block routes in device memory.
  plan.most_routing_blocks = plan.workspace_offset >= 0 ? std::min(num_sms, kMaxRoutingBlocks) : 1;
  return plan;
}

using Kernel = void (*)(DispatchParams);

template <bool kRouted>
Kernel kernel_of(bool bulk, bool packed) {
  if constexpr (!GroupTransport::kPuts) {
    if (bulk) {
      return packed ? dispatch_bulk_kernel<GroupTransport, kRouted, true>
                    : dispatch_bulk_kernel<GroupTransport, kRouted, false>;
    }
  }
  return dispatch_plain_kernel<GroupTransport, kRouted>;
}
Kernel kernel_of(bool bulk, bool routed, bool packed) {
  return routed ? kernel_of<true>(bulk, packed) : kernel_of<false>(bulk, packed);
}

}  // namespace

DispatchPlan plan_dispatch(const WindowShape& shape, int num_sms, const DeviceLimits& limits) {
  return make_plan(shape, num_sms, limits, /*whole_rows=*/false);
}
DispatchPlan plan_packed_dispatch(const WindowShape& shape, int num_sms,
                                  const DeviceLimits& limits) {
  return make_plan(shape, num_sms, limits, /*whole_rows=*/true);
}

cudaError_t prepare_dispatch() {
  for (const bool bulk : {true, false}) {
    for (const bool routed : {true, false}) {
      for (const bool packed : {true, false}) {
        const Kernel kernel = kernel_of(bulk, routed, packed);
        const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return prepare_pack_rows();
}

cudaError_t launch_dispatch(const DispatchParams& given, cudaStream_t stream) {
  DispatchParams params = given;
  const DispatchPlan& plan = params.plan;
  params.num_routing_blocks =
      std::min(plan.most_routing_blocks, wanted_routing_blocks(params.op.num_tokens));
  if (params.quantized()) {
    const cudaError_t error =
        launch_pack_rows({params.x, params.packed, params.op.num_tokens, params.hidden,
                          params.row_type, params.power_of_two_scales},
                         stream);
    if (error != cudaSuccess) return error;
    params.x = params.packed;
  }
  const Kernel kernel = kernel_of(plan.bulk, params.routed(), params.quantized());
  kernel<<<plan.num_blocks, plan.threads(), static_cast<size_t>(plan.shared_bytes), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
