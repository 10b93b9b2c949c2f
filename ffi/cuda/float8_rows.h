// Rows quantised for the way by a kernel of their own, ahead of a high-throughput dispatch, which
// moves packed rows as it moves any.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/numeric.h"
#include "protocol/quantize.h"

namespace jax_ep::gpu {

// Shapes: T tokens, H channels, G = ceil(H / 128) scales.
struct PackParams {
  const char* x;  // [T, H] of row_type
  char* packed;   // [T, packed_row_bytes(H)]: H float8 values, then G float32 scales
  int64_t num_tokens;
  int64_t hidden;
  RowType row_type;
  bool power_of_two_scales;
};

cudaError_t prepare_pack_rows();

cudaError_t launch_pack_rows(const PackParams& params, cudaStream_t stream);

}  // namespace jax_ep::gpu
