// Rows as float8 (e4m3fn: no infinities, NaN 0x7F and 0xFF, largest value 448) with one float32
// scale per group of 128 channels; the last group of a row is shorter when H is no multiple of 128.
// Every backend gives the same bits, because each step is one IEEE operation, rounded to nearest
// even:
//
//   amax   = the largest |x| of the group, NaNs left out
//   amax < 2^-100 (or no number at all):  scale = 1, inverse = 1
//   otherwise:                             scale = amax * float32(1 / 448), inverse = 448 / amax
//   with power-of-two scales:              scale = that scale rounded up to a power of two,
//                                          inverse = 1 / scale, which is exact
//   value  = e4m3fn(x * inverse), saturating at 448, NaN becoming 0x7F
//   back   = row_type(float32(value) * scale)
//
// A group with an infinity comes back as NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout/host_device.h"

namespace jax_ep {

constexpr int kScaleGroup = 128;    // channels that share a scale
constexpr int kQuantizedUnit = 16;  // channels in 16 bytes of float8
constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallestAmax = 0x1p-100f;

// How rows travel. Programs carry the number.
enum class ScaleFormat : int { kUnquantized = 0, kFloat32 = 1, kPowerOfTwo = 2 };

JAX_EP_HD constexpr int num_scales(int64_t hidden) {
  return static_cast<int>((hidden + kScaleGroup - 1) / kScaleGroup);
}
// Where the scales lie in a quantised row on its way: after the values, on 16 bytes.
JAX_EP_HD constexpr int64_t wire_scales_offset(int64_t hidden) {
  return (hidden + kQuantizedUnit - 1) / kQuantizedUnit * kQuantizedUnit;
}
JAX_EP_HD constexpr int64_t quantized_row_bytes(int64_t hidden) {
  return wire_scales_offset(hidden) + int64_t{sizeof(float)} * num_scales(hidden);
}

// And of a row packed for a message of high throughput on GPUs: the scales follow the values at
// once, which in a row of whole 16 bytes leaves no quantised row longer than the row was.
JAX_EP_HD constexpr int64_t packed_row_bytes(int64_t hidden) {
  return (hidden + int64_t{sizeof(float)} * num_scales(hidden) + 15) / 16 * 16;
}

JAX_EP_HD inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JAX_EP_HD inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

struct GroupScale {
  float scale;    // travels with the values
  float inverse;  // what the sender multiplies by
};

JAX_EP_HD inline GroupScale group_scale(float amax, bool power_of_two) {
  if (!(amax >= kSmallestAmax)) return {1.0f, 1.0f};
#if defined(__CUDA_ARCH__)
  const float scale = __fmul_rn(amax, 1.0f / kLargestE4m3);
  if (!power_of_two) return {scale, __fdiv_rn(kLargestE4m3, amax)};
#else
  const float scale = amax * (1.0f / kLargestE4m3);
  if (!power_of_two) return {scale, kLargestE4m3 / amax};
#endif
  constexpr uint32_t kMantissa = 0x007FFFFFu;
  constexpr uint32_t kInfinity = 0x7F800000u;
  constexpr uint32_t kOneTwice = 254u
                                 << 23;  // exponents of a number and of its inverse add up to it
  const uint32_t bits = (bits_of_float(scale) + kMantissa) & ~kMantissa;
  return {float_of_bits(bits), bits >= kInfinity ? 0.0f : float_of_bits(kOneTwice - bits)};
}

// Without branches, so that loops over a row vectorise.
JAX_EP_HD inline uint8_t encode_e4m3(float value) {
  constexpr uint32_t kInfinity = 0x7F800000u;
  constexpr uint32_t kLargestCode = 0x7E;
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  constexpr uint32_t kRebias = (127 - 7) << 3;
  const uint32_t sign = bits_of_float(value) >> 24 & 0x80u;
  const uint32_t magnitude = bits_of_float(value) & 0x7FFFFFFFu;
  // The sum's last bit is worth 2^-9, one step of the subnormals.
  constexpr float kMagic = 0x1p14f;
  const uint32_t subnormal =
      bits_of_float(float_of_bits(magnitude) + kMagic) - bits_of_float(kMagic);
  const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
  const uint32_t normal = (rounded >> 20) - kRebias;
  uint32_t code = normal < kLargestCode ? normal : kLargestCode;
  code = magnitude < kSmallestNormal ? subnormal : code;
  return static_cast<uint8_t>(magnitude > kInfinity ? 0x7Fu : (sign | code));
}

JAX_EP_HD inline float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t subnormal =
      bits_of_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  const uint32_t normal = (magnitude + ((127 - 7) << 3)) << 20;
  const uint32_t number = magnitude < 8 ? subnormal : normal;
  return float_of_bits(sign | (magnitude == 0x7F ? 0x7FC00000u : number));
}

// One step of dequantisation, before the rounding to the row type.
JAX_EP_HD inline float dequantized(uint8_t code, float scale) { return decode_e4m3(code) * scale; }

}  // namespace jax_ep
