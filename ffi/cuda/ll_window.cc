#include "cuda/ll_window.h"

#include <algorithm>

namespace jax_ep::gpu {

namespace {

constexpr int kSmThreads = 2048;
constexpr int kSmBlocks = 32;
// What a block takes of a multiprocessor's shared memory for itself.
constexpr int64_t kReservedBytes = 1024;

int blocks_per_sm(int threads, int64_t shared_bytes, const DeviceLimits& limits) {
  // The kernels' launch bounds keep registers to what this many threads may have; with one block,
  // to the 128 of a thread that 512 threads may have.
  const int by_registers = kLlMaxThreads * kLlBlocksPerSm / threads;
  const int64_t by_shared =
      (limits.max_shared_bytes + kReservedBytes) / (shared_bytes + kReservedBytes);
  return static_cast<int>(std::clamp<int64_t>(
      std::min<int64_t>({by_registers, by_shared, kSmThreads / threads, kSmBlocks}), 1, kSmBlocks));
}

LlGrid grid_of(int num_tokens, int num_columns, int units, LlBlocks blocks, int64_t shared_bytes,
               int num_sms, const DeviceLimits& limits) {
  constexpr int kFewestColumns = 128;  // of a part, when there are parts to choose
  const int most_parts = std::max(1, num_columns / kFewestColumns);
  const int most_columns = kLlMaxThreads * (blocks == LlBlocks::kLarge ? units : 1);
  const int fewest_parts = (num_columns + most_columns - 1) / most_columns;
  // Two blocks on every multiprocessor, while there are columns to share out.
  const int wanted = kLlBlocksPerSm * num_sms / std::max(1, num_tokens);
  LlGrid grid{};
  grid.units = units;
  grid.num_columns = num_columns;
  const int parts = std::clamp(wanted, fewest_parts, std::max(fewest_parts, most_parts));
  grid.part_columns = static_cast<int>(align_up((num_columns + parts - 1) / parts, kColumnGroup));
  grid.num_parts = (num_columns + grid.part_columns - 1) / grid.part_columns;
  grid.by_parts = LlDivisor::of(grid.num_parts);
  // Two warps at least, and a thread for every rank.
  const int threads = (grid.part_columns + units - 1) / units;
  grid.threads = static_cast<int>(std::max<int64_t>(64, align_up(threads, 32)));
  const int most = std::max(1, num_sms) * blocks_per_sm(grid.threads, shared_bytes, limits);
  grid.num_blocks = std::clamp(grid.num_items(num_tokens), 1, most);
  return grid;
}

}  // namespace

LlGrid plan_ll_grid(int num_tokens, int num_columns, int most_units, LlBlocks blocks,
                    int64_t shared_bytes, int num_sms, const DeviceLimits& limits) {
  const auto with_units = [&](int units) {
    return grid_of(num_tokens, num_columns, units, blocks, shared_bytes, num_sms, limits);
  };
  const LlGrid narrow = with_units(1);
  if (most_units == 1 || narrow.num_items(num_tokens) <= narrow.num_blocks) return narrow;
  return with_units(most_units);
}

int64_t ll_shared_room(const LlGrid& grid, int num_sms, const DeviceLimits& limits) {
  // Two at least, so that blocks of several ranks fit beside each other.
  const int per_sm = std::max(kLlBlocksPerSm, (grid.num_blocks + num_sms - 1) / num_sms);
  return (limits.max_shared_bytes + kReservedBytes) / per_sm - kReservedBytes;
}

cudaError_t fill_ll_window(char* window, const WindowLayout& layout, cudaStream_t stream) {
  if (layout.shape.num_ranks == 1) return cudaSuccess;
  for (int parity = 0; parity < kNumBuffers; ++parity) {
    for (const Region region : {kDispatchData, kCombineData, kCombineScalars}) {
      char* at = window + layout.item(region, parity, 0);
      const auto bytes = static_cast<size_t>(region_bytes(layout.shape, region));
      const cudaError_t error = cudaMemsetAsync(at, 0xFF, bytes, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::gpu
