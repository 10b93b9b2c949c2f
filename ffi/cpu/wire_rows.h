// How dispatch's rows travel and where they end: as they are, or quantised to float8.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/row_math.h"
#include "protocol/numeric.h"
#include "protocol/quantize.h"

namespace jax_ep {

// Of a dispatch whose rows travel as float8. Receivers keep values and scales, or rows again.
struct Float8Rows {
  ScaleFormat format = ScaleFormat::kUnquantized;
  RowType row_type = RowType::kFloat32;  // of x, and of tokens where they are rows
  int64_t hidden = 0;
  float* scales = nullptr;  // [rows of tokens, num_scales(hidden)]; null: tokens are rows

  bool quantized() const { return format != ScaleFormat::kUnquantized; }
};

// Scratch that a worker keeps between operations.
struct WireScratch {
  std::vector<char> packed, opened;  // one row each
};

// A row goes through pack() to travel and through open() to be stored: as often as rows() says.
// Whoever packs it, and however often, its bits are the same.
class WireRows {
 public:
  WireRows(const Float8Rows& float8, char* tokens, int64_t row_bytes, WireScratch& scratch)
      : float8_(float8), tokens_(tokens), row_bytes_(row_bytes), scratch_(scratch) {
    if (!float8_.quantized()) return;
    scratch_.packed.resize(quantized_row_bytes(float8_.hidden));
    if (float8_.scales == nullptr) scratch_.opened.resize(row_bytes);
  }

  int64_t packed_bytes() const {
    return float8_.quantized() ? quantized_row_bytes(float8_.hidden) : row_bytes_;
  }

  // A row as it travels. Good until the next call.
  const char* pack(const char* row) {
    if (!float8_.quantized()) return row;
    char* packed = scratch_.packed.data();
    row_math().quantize(row, float8_.hidden, float8_.row_type, float8_.format, values_of(packed),
                        scales_of(packed));
    return packed;
  }

  // What put() takes, from what pack() gave. Good until the next call.
  const char* open(const char* packed) {
    if (!float8_.quantized() || float8_.scales != nullptr) return packed;
    char* row = scratch_.opened.data();
    row_math().dequantize(values_of(packed), scales_of(packed), float8_.hidden, float8_.row_type,
                          row);
    return row;
  }

  void put(int64_t at, const char* opened) {
    std::memcpy(tokens_ + at * token_bytes(), opened, token_bytes());
    if (float8_.scales == nullptr) return;
    std::memcpy(float8_.scales + at * num_scales(float8_.hidden), scales_of(opened),
                sizeof(float) * num_scales(float8_.hidden));
  }

  // What put() makes of rows of zeros.
  void put_zeros(int64_t begin, int64_t end) {
    std::memset(tokens_ + begin * token_bytes(), 0, (end - begin) * token_bytes());
    if (float8_.scales == nullptr) return;
    const int64_t per_row = num_scales(float8_.hidden);
    std::fill(float8_.scales + begin * per_row, float8_.scales + end * per_row, 1.0f);
  }

 private:
  int64_t token_bytes() const { return float8_.scales != nullptr ? float8_.hidden : row_bytes_; }
  static uint8_t* values_of(char* packed) { return reinterpret_cast<uint8_t*>(packed); }
  static const uint8_t* values_of(const char* packed) {
    return reinterpret_cast<const uint8_t*>(packed);
  }
  float* scales_of(char* packed) const {
    return reinterpret_cast<float*>(packed + wire_scales_offset(float8_.hidden));
  }
  const float* scales_of(const char* packed) const {
    return reinterpret_cast<const float*>(packed + wire_scales_offset(float8_.hidden));
  }

  const Float8Rows& float8_;
  char* const tokens_;
  const int64_t row_bytes_;
  WireScratch& scratch_;
};

}  // namespace jax_ep
