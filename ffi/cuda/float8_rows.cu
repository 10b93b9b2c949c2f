#include <algorithm>

#include "cuda/float8.cuh"
#include "cuda/float8_rows.h"
#include "cuda/launch.h"
#include "cuda/vectors.cuh"

namespace jax_ep::gpu {
namespace {

constexpr int kThreads = 256;

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

__device__ void store_column(const PackParams& p, char* row, int column,
                             const QuantizedColumn& packed) {
  const int64_t at = int64_t{column} * kQuantizedUnit;
  if (at + kQuantizedUnit <= p.hidden) {
    *reinterpret_cast<uint4*>(row + at) = packed.data;
  } else {
    const uint32_t words[4] = {packed.data.x, packed.data.y, packed.data.z, packed.data.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + 4 * i < p.hidden) *reinterpret_cast<uint32_t*>(row + at + 4 * i) = words[i];
    }
  }
  if (column % kThreadsPerScale == 0 && at < p.hidden) {
    reinterpret_cast<float*>(row + p.hidden)[column / kThreadsPerScale] = packed.scale;
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
    const QuantizedColumn packed = quantize_column(x, p.power_of_two_scales);
    if (i < total) {
      store_column(p, p.packed + token * packed_row_bytes(p.hidden), column, packed);
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
