// Arithmetic on rows. Compiled once per instruction set; row_math() picks what this CPU runs.
#pragma once

#include <cstdint>

#include "protocol/numeric.h"
#include "protocol/quantize.h"

namespace jax_ep {

struct RowTerm {
  const char* row;
  float weight;
};

// Consecutive terms of a sum of sums.
struct RowPart {
  int num_terms;
  bool rounded;  // summed on its own and rounded to the row's type before it enters; else term by
                 // term
};

struct RowMath {
  // out = round(fma(w_n, row_n, ... fma(w_1, row_1, 0))), in the order of `terms`; zero without
  // terms.
  void (*sum)(const RowTerm* terms, int num_terms, char* out, int64_t hidden, RowType type);
  // out = round(sum of the parts in their order), in float32. The terms of all parts follow each
  // other.
  void (*sum_parts)(const RowPart* parts, int num_parts, const RowTerm* terms, char* out,
                    int64_t hidden, RowType type);
  // out = round(weight * row)
  void (*scale)(const char* row, float weight, char* out, int64_t hidden, RowType type);
  // <a, b> in float32, in the order that numeric.h gives.
  float (*dot)(const char* a, const char* b, int64_t hidden, RowType type);
  // values [hidden] and scales [num_scales(hidden)] of a row, as quantize.h says.
  void (*quantize)(const char* row, int64_t hidden, RowType type, ScaleFormat format,
                   uint8_t* values, float* scales);
  // out = round(value * scale)
  void (*dequantize)(const uint8_t* values, const float* scales, int64_t hidden, RowType type,
                     char* out);
};

const RowMath& row_math();

}  // namespace jax_ep
