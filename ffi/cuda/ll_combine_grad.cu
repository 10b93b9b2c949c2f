#include <algorithm>

#include "cuda/combine_grad_marks.cuh"
#include "cuda/combine_grad_plain.cuh"
#include "cuda/ll_combine_grad.h"
#include "cuda/ll_payload.cuh"
#include "cuda/ll_puts.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 256;

// A block takes whole tokens: the order of the dot products allows no split of a row.
template <class Transport, RowType kType>
class LlCombineGrad {
 public:
  __device__ LlCombineGrad(const LlContext& ctx, const CombineGradParams& p,
                           uint32_t (&destinations)[2])
      : ctx_(ctx),
        p_(p),
        destinations_(destinations),
        num_vectors_(static_cast<int>(p.op.layout.shape.row_bytes / 16)) {}

  // All threads, once the operation has begun.
  __device__ void run() {
    mark_named_rows(p_);
    for (int t = blockIdx.x; t < p_.op.num_tokens; t += gridDim.x) send(t);
    meet_peers(ctx_, nullptr, nullptr);
    for (int t = blockIdx.x; t < p_.op.num_tokens; t += gridDim.x) {
      make_rows(p_.g + t * p_.op.layout.shape.row_bytes, {ctx_.rank(), t});
      for (int r = 0; r < ctx_.num_ranks(); ++r) {
        if (r != ctx_.rank()) receive({r, t});
      }
    }
    if (threadIdx.x == 0) wait_for_marks(ctx_);
    if (!__syncthreads_or(ctx_.aborted())) zero_unnamed_rows(p_);
  }

 private:
  __device__ int64_t slot_offset(MessageId id) const {
    return p_.op.layout.dispatch_message(parity_of(ctx_.epoch), id.peer, id.token);
  }

  // The flag says only whether a row comes: its words say themselves when they have come.
  __device__ void send(int token) {
    if (warp_id() == 0) {
      const uint64_t ranks = destinations_of(ctx_, load_grad_entry(p_, token).rank).ranks;
      if (lane_id() < 2)
        destinations_[lane_id()] = static_cast<uint32_t>(ranks >> (32 * lane_id()));
      const int64_t flag = p_.op.layout.dispatch_flag(parity_of(ctx_.epoch), ctx_.rank(), token);
      for (int r = lane_id(); r < ctx_.num_ranks(); r += kWarp) {
        if (r == ctx_.rank()) continue;
        Transport::signal(ctx_, r, flag, arrival_flag(ctx_.epoch, (ranks >> r & 1) != 0));
      }
    }
    __syncthreads();
    const auto* row = reinterpret_cast<const uint4*>(p_.g + token * p_.op.layout.shape.row_bytes);
    for (int v = threadIdx.x; v < num_vectors_; v += blockDim.x) {
      const uint4 value = without_sentinel(load_constant(row + v));
      uint64_t left = static_cast<uint64_t>(destinations_[1]) << 32 | destinations_[0];
      for (; left != 0; left &= left - 1) {
        const int rank = __ffsll(static_cast<long long>(left)) - 1;
        char* slot = Transport::window(ctx_, rank, slot_offset({ctx_.rank(), token}));
        store_words(slot + int64_t{v} * 16, value);
      }
    }
    const uint64_t ranks = static_cast<uint64_t>(destinations_[1]) << 32 | destinations_[0];
    put_to_remote<Transport>(ctx_, ranks, [&](int rank) {
      Transport::put(ctx_, rank, slot_offset({ctx_.rank(), token}), p_.op.layout.shape.row_bytes);
    });
    __syncthreads();  // everybody has read the destinations
  }

  // All threads. The words stay until all warps have read them.
  __device__ void receive(MessageId id) const {
    char* slot = ctx_.own_window(slot_offset(id));
    if (!comes(id)) return;
    for (int v = threadIdx.x; v < num_vectors_; v += blockDim.x) {
      uint4 value = load_words(slot + int64_t{v} * 16);
      wait_for_payload(ctx_, slot + int64_t{v} * 16, id.peer, &value);
    }
    if (__syncthreads_or(ctx_.aborted())) return;
    make_rows(slot, id);
    __syncthreads();
    for (int v = threadIdx.x; v < num_vectors_; v += blockDim.x) {
      restore_sentinels(slot + int64_t{v} * 16);
    }
  }

  // All threads alike: they wait for the same word. A block barrier.
  __device__ bool comes(MessageId id) const {
    const int64_t offset = p_.op.layout.dispatch_flag(parity_of(ctx_.epoch), id.peer, id.token);
    const auto* flag = reinterpret_cast<const uint32_t*>(ctx_.own_window(offset));
    LlWait bound;
    Arrival arrival = Arrival::kPending;
    while (threadIdx.x == 0 && arrival == Arrival::kPending) {
      const uint32_t seen = load_relaxed<kSystemScope>(flag);
      arrival = read_arrival(seen, ctx_.epoch);
      if (bound.over(ctx_, WaitFor::kRow, id.peer, seen)) break;
    }
    return __syncthreads_or(arrival == Arrival::kArrived);
  }

  // Each warp makes the gradients of some of the message's rows.
  __device__ void make_rows(const char* g, MessageId id) const {
    const GradRow row = load_grad_row(p_, id);
    const int num_warps = static_cast<int>(blockDim.x) / kWarp;
    int index = 0;
    for (unsigned left = __ballot_sync(kFullWarp, row.row >= 0); left != 0; left &= left - 1) {
      if (index++ % num_warps != warp_id()) continue;
      make_gradients<kType, 1>(p_, g, row.row, row.weight, left & (~left + 1));
    }
  }

  const LlContext& ctx_;
  const CombineGradParams& p_;
  uint32_t (&destinations_)[2];
  const int num_vectors_;
};

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kThreads, 1)
    ll_combine_grad_kernel(const __grid_constant__ LlCombineGradParams params) {
  __shared__ BlockState state;
  __shared__ LlVerdict verdict;
  __shared__ uint32_t destinations[2];
  const CombineGradParams& p = params.grad;
  const LlTurn& turn = params.turn;
  LlCounters counters = LlCounters::ask(p.op);
  const LlOpening opening = LlOpening::read(p.op, turn, state);
  counters.look();
  const LlContext ctx{{p.op, state, counters.epoch(turn)}, verdict};
  const bool begun = begin_ll(ctx, turn, counters, opening);
  if (begun) LlCombineGrad<Transport, kType>(ctx, p, destinations).run();
  finish_ll(
      ctx, turn, begun, true, [&] { spoil_combine_grad(p); }, [&] { clear_channel_state(p.op); });
}

using Kernel = void (*)(LlCombineGradParams);

template <class Transport>
Kernel kernel_of(RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return ll_combine_grad_kernel<Transport, RowType::kFloat32>;
    case RowType::kBFloat16:
      return ll_combine_grad_kernel<Transport, RowType::kBFloat16>;
    case RowType::kFloat16:
      return ll_combine_grad_kernel<Transport, RowType::kFloat16>;
  }
  return nullptr;
}

}  // namespace

cudaError_t prepare_ll_combine_grad() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    const cudaError_t error =
        prepare_kernel(reinterpret_cast<const void*>(kernel_of<GroupTransport>(type)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int plan_ll_combine_grad(int num_tokens, int num_sms) {
  return std::clamp(num_tokens, 1, std::max(1, num_sms));
}

cudaError_t launch_ll_combine_grad(const LlCombineGradParams& params, cudaStream_t stream) {
  kernel_of<GroupTransport>(params.grad.row_type)<<<params.num_blocks, kThreads, 0, stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
