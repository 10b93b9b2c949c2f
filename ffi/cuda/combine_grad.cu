#include <algorithm>

#include "cuda/combine_grad.h"
#include "cuda/combine_grad_bulk.cuh"
#include "cuda/combine_grad_plain.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 384;  // more would leave a thread too few registers

// ---- Rows that no entry names get zeros. A bit per row says which are named; the bits are zero
// between operations.

__device__ void mark_named_rows(const CombineGradParams& p) {
  const WindowShape& shape = p.op.layout.shape;
  ChannelState* state = p.op.state();
  const int64_t entries = int64_t{shape.num_ranks} * p.op.num_tokens * shape.num_experts_per_tok;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  uint32_t highest = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < entries; i += threads) {
    const int row = p.recv_rows[i];
    if (row < 0 || row >= p.capacity || row / 32 >= p.op.scratch.row_mark_words) continue;
    atomicOr(&p.op.scratch.row_marks[row / 32], 1u << (row % 32));
    highest = max(highest, static_cast<uint32_t>(row) + 1);
  }
  highest = __reduce_max_sync(kFullWarp, highest);
  if (lane_id() == 0 && highest > 0) atomicMax(&state->highest_row.value, highest);
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, kDeviceScope> marked(state->blocks_marked.value);
    marked.fetch_add(1, cuda::memory_order_release);
  }
}

// Each warp takes 32 rows at a time, and clears their bits.
__device__ void zero_unnamed_rows(const CombineGradParams& p) {
  const int64_t row_bytes = p.op.layout.shape.row_bytes;
  const int64_t highest = load_relaxed<kDeviceScope>(&p.op.state()->highest_row.value);
  const int64_t end =
      p.zero_tail ? p.capacity : min(p.capacity, align_up(highest, p.expert_alignment));
  const int64_t words = (p.capacity + 31) / 32;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t w = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp_id(); w < words; w += warps) {
    uint32_t marks = 0;
    if (w < p.op.scratch.row_mark_words) {
      marks = load_relaxed<kDeviceScope>(&p.op.scratch.row_marks[w]);
      __syncwarp();
      if (lane_id() == 0 && marks != 0) p.op.scratch.row_marks[w] = 0;
    }
    const int64_t mine = w * 32 + lane_id();
    const bool unnamed = mine < p.capacity && (marks >> lane_id() & 1) == 0;
    if (unnamed) p.d_row_weights[mine] = 0.0f;
    for (unsigned left = __ballot_sync(kFullWarp, unnamed && mine < end); left != 0;
         left &= left - 1) {
      const int64_t row = w * 32 + __ffs(left) - 1;
      zero_vectors(p.d_y + row * row_bytes, row_bytes / 16, lane_id(), kWarp);
    }
  }
}

// One thread. False when the operation was aborted.
__device__ bool wait_for_marks(const OpContext& ctx) {
  BoundedWait bound;
  const uint32_t* marked = &ctx.op.state()->blocks_marked.value;
  for (uint32_t seen; (seen = load_acquire<kDeviceScope>(marked)) < gridDim.x;) {
    if (bound.over(ctx, WaitFor::kRow, ctx.rank(), ctx.epoch, gridDim.x, seen)) return false;
  }
  return true;
}

// All threads of one block: what the outputs of an aborted operation hold.
__device__ void spoil_combine_grad(const CombineGradParams& p) {
  fill_nan(p.d_y, p.capacity * p.op.layout.shape.row_bytes, p.row_type);
  fill_nan(reinterpret_cast<char*>(p.d_row_weights), p.capacity * 4, RowType::kFloat32);
}

// All threads: the work between the beginning and the end of the operation.
template <class Exchange>
__device__ void make_all_gradients(const OpContext& ctx, const CombineGradParams& p,
                                   Exchange exchange) {
  mark_named_rows(p);
  if (speaks_for_rank() && warp_id() == p.plan.workers - 1) {
    for (int r = lane_id(); r < ctx.num_ranks(); r += kWarp) check_tag(ctx, r);
    __syncwarp();
  }
  exchange();
  if (threadIdx.x == 0) wait_for_marks(ctx);
  if (!__syncthreads_or(ctx.aborted())) zero_unnamed_rows(p);
}

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kThreads, 1)
    combine_grad_bulk_kernel(const __grid_constant__ CombineGradParams p) {
#if defined(JAX_EP_BULK_COPY)
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState block;
  init_grad_shared(p, shared);
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    make_all_gradients(ctx, p, [&] { combine_grad_bulk<Transport, kType>(ctx, p, shared); });
  }
  finish_operation(ctx, begun, [&] { spoil_combine_grad(p); });
#endif
}

template <class Transport, RowType kType>
__global__ void __launch_bounds__(kThreads, 1)
    combine_grad_plain_kernel(const __grid_constant__ CombineGradParams p) {
  __shared__ BlockState block;
  const OpContext ctx = OpContext::make(p.op, block);
  const bool begun = begin_operation<Transport>(ctx);
  if (begun) {
    GradWork<kType> work(ctx, p);
    make_all_gradients(ctx, p, [&] { exchange_rows<Transport>(ctx, work, p.plan.senders); });
  }
  finish_operation(ctx, begun, [&] { spoil_combine_grad(p); });
}

using Kernel = void (*)(CombineGradParams);

template <class Transport>
Kernel kernel_of(RowType type, bool bulk) {
  switch (type) {
    case RowType::kFloat32:
      return bulk ? combine_grad_bulk_kernel<Transport, RowType::kFloat32>
                  : combine_grad_plain_kernel<Transport, RowType::kFloat32>;
    case RowType::kBFloat16:
      return bulk ? combine_grad_bulk_kernel<Transport, RowType::kBFloat16>
                  : combine_grad_plain_kernel<Transport, RowType::kBFloat16>;
    case RowType::kFloat16:
      return bulk ? combine_grad_bulk_kernel<Transport, RowType::kFloat16>
                  : combine_grad_plain_kernel<Transport, RowType::kFloat16>;
  }
  return nullptr;
}

}  // namespace

CombineGradPlan plan_combine_grad(const WindowShape& shape, int num_sms,
                                  const DeviceLimits& limits) {
  constexpr int kFewestBulkWarps = 3;  // with fewer, plain accesses keep more rows in flight
  constexpr int64_t kMostPieceBytes = 8192;
  constexpr int64_t kSmallThings = 4096;  // barriers, static shared memory
  CombineGradPlan plan{};
  plan.num_blocks = num_sms;
  plan.num_parts = static_cast<int>((shape.row_bytes + kMostPieceBytes - 1) / kMostPieceBytes);
  plan.piece_bytes = align_up((shape.row_bytes + plan.num_parts - 1) / plan.num_parts,
                              kDotLanes * 4);  // no piece ends inside a round of the dot product
  plan.num_parts = static_cast<int>((shape.row_bytes + plan.piece_bytes - 1) / plan.piece_bytes);
  plan.g_bytes = align_up(shape.row_bytes, 128);
  const int64_t room = limits.max_shared_bytes - kSmallThings;
  constexpr int kMostWarps = kThreads / kWarp;
  plan.workers = static_cast<int>(std::min<int64_t>(kMostWarps - 1, room / plan.warp_bytes()));
  plan.bulk = limits.bulk_copy && plan.workers >= kFewestBulkWarps;
  if (!plan.bulk) plan.workers = kMostWarps;
  plan.senders = shape.num_ranks == 1 ? plan.workers : plan.workers / 2;
  plan.threads = (plan.workers + (plan.bulk ? 1 : 0)) * kWarp;
  if (plan.bulk) {
    SharedLayout layout(limits.max_shared_bytes - kSmallThings / 2);
    layout.take(plan.workers * plan.warp_bytes());
    plan.barrier_offset = layout.take(int64_t{8} * kGradBarriers * plan.workers);
    plan.outbox_offset = layout.take(plan.senders * static_cast<int64_t>(sizeof(Outbox)));
    plan.shared_bytes = layout.used();
  }
  return plan;
}

cudaError_t prepare_combine_grad() {
  for (RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (bool bulk : {false, true}) {
      const Kernel kernel = kernel_of<PeerTransport>(type, bulk);
      const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_combine_grad(const CombineGradParams& params, cudaStream_t stream) {
  const CombineGradPlan& plan = params.plan;
  const Kernel kernel = kernel_of<PeerTransport>(params.row_type, plan.bulk);
  kernel<<<plan.num_blocks, plan.threads, static_cast<size_t>(plan.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
