#include <algorithm>

#include "cuda/launch.h"
#include "cuda/notify.h"
#include "cuda/route.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 512;

// Totals go to all ranks, indices to the program.
struct NotifySink {
  int32_t* row_index;

  // Neighbouring experts leave from one block, so that their words travel together.
  template <class Transport>
  __device__ void send_total(const OpContext& ctx, const RouteArgs& args, int expert,
                             uint32_t total) const {
    if (expert / kWarp % args.num_blocks != static_cast<int>(blockIdx.x)) return;
    const int64_t offset = ctx.op.layout.notify_count(ctx.chunk_parity(0), ctx.rank(), expert);
    for (int step = 1; step <= ctx.num_ranks(); ++step) {
      const int peer = (ctx.rank() + step) % ctx.num_ranks();
      Transport::signal(ctx, peer, offset, epoch_word(ctx.epoch, total));
    }
  }
  __device__ void keep(const OpContext&, int64_t entry, int, int index) const {
    row_index[entry] = index;
  }
};

__device__ bool is_routing_block(const NotifyParams& p) {
  return static_cast<int>(blockIdx.x) < p.plan.num_routing_blocks;
}

__device__ RouteArgs route_args(const NotifyParams& p, uint32_t* shared) {
  return {p.topk_idx, p.sanitised_idx, p.plan.in_shared ? shared : p.op.scratch.route_workspace,
          p.plan.in_shared, p.plan.num_routing_blocks};
}

// What the host has been told in this ticket's slot before. All words of a slot have one ticket,
// since operations of a device follow each other; the load crosses the host's bus.
__device__ uint64_t load_last_notice(const NotifyParams& p, uint32_t ticket) {
  const NoticeLayout notice{p.op.layout.shape.num_experts};
  return load_relaxed<kSystemScope>(p.counters.first + notice.recv_tokens(ticket));
}

// One thread: one expert's counts of all sources. False when the wait was given up.
__device__ bool receive_counts(const OpContext& ctx, const NotifyParams& p, int expert) {
  constexpr int kAtOnce = 8;
  const int num_ranks = ctx.num_ranks();
  const int num_experts = ctx.op.layout.shape.num_experts;
  for (int first = 0; first < num_ranks; first += kAtOnce) {
    uint64_t word[kAtOnce];
    BoundedWait bound;
    while (true) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int source = min(first + i, num_ranks - 1);
        const int64_t offset = ctx.op.layout.notify_count(ctx.chunk_parity(0), source, expert);
        word[i] = load_relaxed<kSystemScope>(reinterpret_cast<uint64_t*>(ctx.own_window(offset)));
      }
      int missing = -1;
      uint64_t seen = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (word_is_of(word[i], ctx.epoch)) continue;
        missing = min(first + i, num_ranks - 1);
        seen = word[i];
      }
      if (missing < 0) break;
      if (bound.over(ctx, WaitFor::kCount, missing, ctx.epoch, epoch_word(ctx.epoch, 0), seen)) {
        return false;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= num_ranks) continue;
      // A count that no rank can have sent is taken for none, as in dispatch.
      const uint32_t count = word_value(word[i]);
      const bool possible = count <= static_cast<uint32_t>(ctx.op.num_tokens);
      p.counts[int64_t{first + i} * num_experts + expert] = possible ? static_cast<int>(count) : 0;
    }
  }
  return true;
}

// All threads of a block. Each sums what it has received itself. The words stand for themselves
// alone: nothing that the host reads lies behind them.
__device__ void tell_host(const OpContext& ctx, const NotifyParams& p, uint32_t ticket,
                          uint32_t* rows_here) {
  const WindowShape& shape = ctx.op.layout.shape;
  const NoticeLayout notice{shape.num_experts};
  const int first_here = ctx.rank() * shape.experts_per_rank();
  for (int expert = threadIdx.x; expert < shape.num_experts; expert += blockDim.x) {
    uint32_t rows = 0;
    for (int source = 0; source < shape.num_ranks; ++source) {
      rows += static_cast<uint32_t>(p.counts[int64_t{source} * shape.num_experts + expert]);
    }
    store_relaxed<kSystemScope>(p.counters.first + notice.expert_tokens(ticket, expert),
                                ticket_word(ticket, rows));
    const int local = expert - first_here;
    if (local >= 0 && local < shape.experts_per_rank()) atomicAdd(rows_here, rows);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    store_relaxed<kSystemScope>(p.counters.first + notice.recv_tokens(ticket),
                                ticket_word(ticket, *rows_here));
  }
}

// All threads of the speaking block.
__device__ void collect_counts(const OpContext& ctx, const NotifyParams& p, uint32_t ticket,
                               uint64_t last_notice) {
  __shared__ uint32_t rows_here;
  __shared__ uint32_t is_wanted;
  const int tid = static_cast<int>(threadIdx.x);
  if (tid == 0) rows_here = 0;
  if (tid < ctx.num_ranks()) check_tag(ctx, tid);
  for (int expert = tid; expert < ctx.op.layout.shape.num_experts; expert += blockDim.x) {
    if (!receive_counts(ctx, p, expert)) break;
  }
  if (tid == 0) {
    is_wanted = ticket != kNoTicket && counter_state(last_notice, ticket) != CounterState::kReused;
  }
  if (__syncthreads_or(ctx.aborted())) return;
  if (is_wanted != 0) tell_host(ctx, p, ticket, &rows_here);
}

// All threads of one block: what the outputs of an aborted operation hold. The host's counters stay
// as they were, and its reader finds the error record.
__device__ void spoil_notify(const NotifyParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const WindowShape& shape = p.op.layout.shape;
  const int64_t entries = int64_t{p.op.num_tokens} * shape.num_experts_per_tok;
  fill(p.sanitised_idx, entries, -1, thread, threads);
  fill(p.row_index, entries, -1, thread, threads);
  fill(p.counts, int64_t{shape.num_ranks} * shape.num_experts, 0, thread, threads);
}

// The last block waits for the counts of all ranks and tells the host, while the others write the
// indices. Of one block alone, the counts come first.
template <class Transport>
__global__ void __launch_bounds__(kThreads, 1)
    notify_kernel(const __grid_constant__ NotifyParams p) {
  extern __shared__ __align__(128) uint32_t workspace[];
  __shared__ BlockState block;
  uint32_t ticket = kNoTicket;
  uint64_t last_notice = 0;
  if (speaks_for_rank()) {
    ticket = *p.ticket;
    if (threadIdx.x == 0 && ticket != kNoTicket) last_notice = load_last_notice(p, ticket);
  }
  const RouteArgs args = route_args(p, workspace);
  if (is_routing_block(p)) count_ahead(p.op, args);
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    if (is_routing_block(p)) {
      count_late(p.op, args);
      const NotifySink sink{p.row_index};
      Router<NotifySink>(ctx, args, sink).template run<Transport>();
    }
    if (speaks_for_rank()) collect_counts(ctx, p, ticket, last_notice);
  }
  finish_operation(ctx, begun, [&] { spoil_notify(p); });
}

}  // namespace

NotifyPlan plan_notify(const WindowShape& shape, int num_tokens, int num_sms,
                       const DeviceLimits& limits) {
  constexpr int64_t kStaticBytes = 8192;
  const int64_t workspace = 4 * route_workspace_words(shape);
  NotifyPlan plan{};
  plan.in_shared = workspace <= limits.max_shared_bytes - kStaticBytes;
  plan.shared_bytes = plan.in_shared ? workspace : 0;
  // With more experts than shared memory holds, one block routes in device memory.
  const int most = plan.in_shared ? std::max(1, num_sms - 1) : 1;
  plan.num_routing_blocks = std::min(most, wanted_routing_blocks(num_tokens));
  plan.num_blocks = std::min(num_sms, plan.num_routing_blocks + 1);
  return plan;
}

cudaError_t prepare_notify() {
  return prepare_kernel(reinterpret_cast<const void*>(notify_kernel<GroupTransport>));
}

cudaError_t launch_notify(const NotifyParams& given, cudaStream_t stream) {
  NotifyParams params = given;
  params.op.num_chunks = 1;  // counts do not come in chunks
  const NotifyPlan& plan = params.plan;
  notify_kernel<GroupTransport>
      <<<plan.num_blocks, kThreads, static_cast<size_t>(plan.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
