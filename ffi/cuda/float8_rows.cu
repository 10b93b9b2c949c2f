#include <algorithm>

#include "cuda/float8_rows.h"
#include "cuda/launch.h"
#include "cuda/ll_wire.cuh"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadsPerScale = kScaleGroup / kQuantizedUnit;  // each has a column of 16 channels

template <RowType kType>
struct Column {
  using Vector = RowVector<kType>;
  static constexpr int kVectors = kQuantizedUnit / Vector::kElements;

  // Zeros behind the row's end.
  __device__ static void load(const PackParams& p, int64_t token, int column,
                              float (&x)[kQuantizedUnit]) {
    const int64_t row_bytes = p.hidden * row_type_bytes(kType);
    const auto* row = reinterpret_cast<const uint4*>(p.x + token * row_bytes);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = column * kVectors + i;
      float part[Vector::kElements];
      Vector::unpack(vector < row_bytes / 16 ? load_constant(row + vector) : make_uint4(0, 0, 0, 0),
                     part);
#pragma unroll
      for (int j = 0; j < Vector::kElements; ++j) x[i * Vector::kElements + j] = part[j];
    }
  }
};

__device__ void store_column(const PackParams& p, char* row, int column, const uint32_t (&words)[4],
                             float scale) {
  const int64_t at = int64_t{column} * kQuantizedUnit;
  if (at + kQuantizedUnit <= p.hidden) {
    *reinterpret_cast<uint4*>(row + at) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + 4 * i < p.hidden) *reinterpret_cast<uint32_t*>(row + at + 4 * i) = words[i];
    }
  }
  if (column % kThreadsPerScale == 0 && at < p.hidden) {
    reinterpret_cast<float*>(row + p.hidden)[column / kThreadsPerScale] = scale;
  }
}

// Columns of a row are counted in whole groups, so that the threads of a group are of one warp and
// of one row.
template <RowType kType>
__global__ void __launch_bounds__(kThreads) pack_rows_kernel(const PackParams p) {
  const int columns = num_scales(p.hidden) * kThreadsPerScale;
  const int64_t total = p.num_tokens * columns;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = first; i - lane_id() < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / columns;
    const int column = static_cast<int>(i - token * columns);
    float x[kQuantizedUnit] = {};
    if (i < total) Column<kType>::load(p, token, column, x);
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuantizedUnit; ++j) amax = fmaxf(amax, fabsf(x[j]));
#pragma unroll
    for (int distance = kThreadsPerScale / 2; distance >= 1; distance /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, distance));
    }
    const GroupScale scale = group_scale(amax, p.power_of_two_scales);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < kQuantizedUnit; ++j) x[j] = __fmul_rn(x[j], scale.inverse);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = encode_four(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
    if (i < total) {
      store_column(p, p.packed + token * packed_row_bytes(p.hidden), column, words, scale.scale);
    }
  }
}

using Kernel = void (*)(PackParams);

Kernel kernel_of(RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return pack_rows_kernel<RowType::kFloat32>;
    case RowType::kBFloat16:
      return pack_rows_kernel<RowType::kBFloat16>;
    case RowType::kFloat16:
      return pack_rows_kernel<RowType::kFloat16>;
  }
  return nullptr;
}

}  // namespace

cudaError_t prepare_pack_rows() {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel_of(type)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_pack_rows(const PackParams& params, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 2048;
  const int64_t threads = params.num_tokens * num_scales(params.hidden) * kThreadsPerScale;
  const int64_t blocks = std::min(kMostBlocks, (threads + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  kernel_of(params.row_type)<<<static_cast<int>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_ep::gpu
