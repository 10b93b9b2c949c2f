// Body of row_math for one instruction set. Included by row_math_*.cc, each compiled with its own
// flags inside its own namespace; plain loops that the compiler vectorises.
#include <algorithm>
#include <cstring>

#include "cpu/row_math.h"

namespace jax_ep {
namespace JAX_EP_ROW_MATH_NAMESPACE {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float load(float value) { return value; }
inline void store(float value, float* out) { *out = value; }

inline float load(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }
inline void store(float value, BFloat16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);  // to nearest, ties to even
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  out->bits = static_cast<uint16_t>((nan ? (bits | 0x400000u) : rounded) >> 16);
}

// Exact: the exponent is moved by a multiplication, which also normalises subnormals.
inline float load(Float16 value) {
  const uint32_t sign = (uint32_t{value.bits} & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t{value.bits} & 0x7FFFu;
  const float scaled = float_of(magnitude << 13) * 0x1p112f;
  const bool special = magnitude >= 0x7C00u;  // infinity or NaN: exponent bits all ones
  const uint32_t bits = special ? ((magnitude << 13) | 0x7F800000u) : bits_of(scaled);
  return float_of(sign | bits);
}
inline void store(float value, Float16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves round(value * 2^24) in the low bits.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // rounds to 65536 or above: infinity
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  out->bits = static_cast<uint16_t>(sign | half);
}

// Up to this many rows are summed side by side: each is a stream of its own to the memory system,
// which fetches several faster than one after another.
constexpr int kSideBySide = 8;

template <typename T, int kTerms>
void sum_side_by_side(const RowTerm* terms, char* out, int64_t hidden) {
  const T* rows[kTerms];
  float weights[kTerms];
  for (int i = 0; i < kTerms; ++i) {
    rows[i] = reinterpret_cast<const T*>(terms[i].row);
    weights[i] = terms[i].weight;
  }
  T* __restrict to = reinterpret_cast<T*>(out);
  for (int64_t j = 0; j < hidden; ++j) {
    float sum = 0.0f;
    for (int i = 0; i < kTerms; ++i) sum = fused_multiply_add(weights[i], load(rows[i][j]), sum);
    store(sum, &to[j]);
  }
}

constexpr int64_t kTile = 256;  // partial sums that stay in the first-level cache

template <typename T>
float rounded(float value) {
  T narrow;
  store(value, &narrow);
  return load(narrow);
}

// The terms' elements from `begin` on enter total: one by one, or (kRounded) as their rounded sum.
template <typename T, int kTerms, bool kRounded>
void add_terms(const RowTerm* terms, int64_t begin, int64_t size, float* __restrict total) {
  const T* rows[kTerms];
  float weights[kTerms];
  for (int i = 0; i < kTerms; ++i) {
    rows[i] = reinterpret_cast<const T*>(terms[i].row) + begin;
    weights[i] = terms[i].weight;
  }
  for (int64_t j = 0; j < size; ++j) {
    float sum = kRounded ? 0.0f : total[j];
    for (int i = 0; i < kTerms; ++i) sum = fused_multiply_add(weights[i], load(rows[i][j]), sum);
    total[j] = kRounded ? fused_multiply_add(1.0f, rounded<T>(sum), total[j]) : sum;
  }
}

// Instantiates add_terms for every number of terms up to kSideBySide.
template <typename T, bool kRounded, int kTerms = kSideBySide>
void add_few(const RowTerm* terms, int num_terms, int64_t begin, int64_t size, float* total) {
  if (num_terms == kTerms) return add_terms<T, kTerms, kRounded>(terms, begin, size, total);
  if constexpr (kTerms > 1) add_few<T, kRounded, kTerms - 1>(terms, num_terms, begin, size, total);
}

template <typename T>
void add_one_by_one(const RowTerm* terms, int num_terms, int64_t begin, int64_t size,
                    float* total) {
  for (; num_terms > kSideBySide; terms += kSideBySide, num_terms -= kSideBySide) {
    add_terms<T, kSideBySide, false>(terms, begin, size, total);
  }
  add_few<T, false>(terms, num_terms, begin, size, total);
}

template <typename T>
void add_part(const RowPart& part, const RowTerm* terms, int64_t begin, int64_t size,
              float* total) {
  if (!part.rounded) return add_one_by_one<T>(terms, part.num_terms, begin, size, total);
  if (part.num_terms <= kSideBySide) {
    return add_few<T, true>(terms, part.num_terms, begin, size, total);
  }
  alignas(64) float sum[kTile] = {};
  add_one_by_one<T>(terms, part.num_terms, begin, size, sum);
  for (int64_t j = 0; j < size; ++j) {
    total[j] = fused_multiply_add(1.0f, rounded<T>(sum[j]), total[j]);
  }
}

template <typename T>
void sum_parts_of(const RowPart* parts, int num_parts, const RowTerm* terms, char* out,
                  int64_t hidden) {
  alignas(64) float total[kTile];
  for (int64_t begin = 0; begin < hidden; begin += kTile) {
    const int64_t size = std::min(kTile, hidden - begin);
    std::fill_n(total, size, 0.0f);
    const RowTerm* next = terms;
    for (int i = 0; i < num_parts; next += parts[i++].num_terms) {
      add_part<T>(parts[i], next, begin, size, total);
    }
    T* to = reinterpret_cast<T*>(out) + begin;
    for (int64_t j = 0; j < size; ++j) store(total[j], &to[j]);
  }
}

template <typename T>
void sum_in_tiles(const RowTerm* terms, int num_terms, char* out, int64_t hidden) {
  const RowPart all{num_terms, false};
  sum_parts_of<T>(&all, 1, terms, out, hidden);
}

// Instantiates sum_side_by_side for every number of terms up to kSideBySide.
template <typename T, int kTerms = kSideBySide>
void sum_rows(const RowTerm* terms, int num_terms, char* out, int64_t hidden) {
  if (num_terms > kSideBySide) return sum_in_tiles<T>(terms, num_terms, out, hidden);
  if (num_terms == kTerms) return sum_side_by_side<T, kTerms>(terms, out, hidden);
  if constexpr (kTerms > 1) {
    return sum_rows<T, kTerms - 1>(terms, num_terms, out, hidden);
  } else {
    std::memset(out, 0, hidden * sizeof(T));
  }
}

template <typename T>
void scale_row(const char* row, float weight, char* out, int64_t hidden) {
  const T* from = reinterpret_cast<const T*>(row);
  T* to = reinterpret_cast<T*>(out);
  for (int64_t j = 0; j < hidden; ++j) store(weight * load(from[j]), &to[j]);
}

template <typename T>
float dot_rows(const char* a, const char* b, int64_t hidden) {
  const T* left = reinterpret_cast<const T*>(a);
  const T* right = reinterpret_cast<const T*>(b);
  alignas(64) float lanes[kDotLanes] = {};
  for (int64_t begin = 0; begin < hidden; begin += kDotLanes) {
    const int64_t size = std::min<int64_t>(kDotLanes, hidden - begin);
    for (int64_t j = 0; j < size; ++j) {
      lanes[j] = fused_multiply_add(load(left[begin + j]), load(right[begin + j]), lanes[j]);
    }
  }
  for (int width = kDotLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

void sum(const RowTerm* terms, int num_terms, char* out, int64_t hidden, RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return sum_rows<float>(terms, num_terms, out, hidden);
    case RowType::kBFloat16:
      return sum_rows<BFloat16>(terms, num_terms, out, hidden);
    case RowType::kFloat16:
      return sum_rows<Float16>(terms, num_terms, out, hidden);
  }
}

void sum_parts(const RowPart* parts, int num_parts, const RowTerm* terms, char* out, int64_t hidden,
               RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return sum_parts_of<float>(parts, num_parts, terms, out, hidden);
    case RowType::kBFloat16:
      return sum_parts_of<BFloat16>(parts, num_parts, terms, out, hidden);
    case RowType::kFloat16:
      return sum_parts_of<Float16>(parts, num_parts, terms, out, hidden);
  }
}

void scale(const char* row, float weight, char* out, int64_t hidden, RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return scale_row<float>(row, weight, out, hidden);
    case RowType::kBFloat16:
      return scale_row<BFloat16>(row, weight, out, hidden);
    case RowType::kFloat16:
      return scale_row<Float16>(row, weight, out, hidden);
  }
}

float dot(const char* a, const char* b, int64_t hidden, RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return dot_rows<float>(a, b, hidden);
    case RowType::kBFloat16:
      return dot_rows<BFloat16>(a, b, hidden);
    case RowType::kFloat16:
      return dot_rows<Float16>(a, b, hidden);
  }
  return 0.0f;
}

template <typename T>
void quantize_row(const char* row, int64_t hidden, bool power_of_two, uint8_t* __restrict values,
                  float* __restrict scales) {
  const T* from = reinterpret_cast<const T*>(row);
  for (int64_t begin = 0; begin < hidden; begin += kScaleGroup) {
    const int64_t size = std::min<int64_t>(kScaleGroup, hidden - begin);
    // Magnitudes compare like their bits, which is cheaper; a NaN's exceed infinity's.
    int32_t amax = 0;
    for (int64_t j = 0; j < size; ++j) {
      const auto magnitude = static_cast<int32_t>(bits_of(load(from[begin + j])) & 0x7FFFFFFFu);
      const int32_t number = magnitude > 0x7F800000 ? 0 : magnitude;
      amax = number > amax ? number : amax;
    }
    const GroupScale group = group_scale(float_of(static_cast<uint32_t>(amax)), power_of_two);
    scales[begin / kScaleGroup] = group.scale;
    for (int64_t j = 0; j < size; ++j) {
      values[begin + j] = encode_e4m3(load(from[begin + j]) * group.inverse);
    }
  }
}

template <typename T>
void dequantize_row(const uint8_t* __restrict values, const float* scales, int64_t hidden,
                    char* out) {
  T* __restrict to = reinterpret_cast<T*>(out);
  for (int64_t begin = 0; begin < hidden; begin += kScaleGroup) {
    const int64_t size = std::min<int64_t>(kScaleGroup, hidden - begin);
    const float scale = scales[begin / kScaleGroup];
    for (int64_t j = 0; j < size; ++j) store(dequantized(values[begin + j], scale), &to[begin + j]);
  }
}

void quantize(const char* row, int64_t hidden, RowType type, ScaleFormat format, uint8_t* values,
              float* scales) {
  const bool power_of_two = format == ScaleFormat::kPowerOfTwo;
  switch (type) {
    case RowType::kFloat32:
      return quantize_row<float>(row, hidden, power_of_two, values, scales);
    case RowType::kBFloat16:
      return quantize_row<BFloat16>(row, hidden, power_of_two, values, scales);
    case RowType::kFloat16:
      return quantize_row<Float16>(row, hidden, power_of_two, values, scales);
  }
}

void dequantize(const uint8_t* values, const float* scales, int64_t hidden, RowType type,
                char* out) {
  switch (type) {
    case RowType::kFloat32:
      return dequantize_row<float>(values, scales, hidden, out);
    case RowType::kBFloat16:
      return dequantize_row<BFloat16>(values, scales, hidden, out);
    case RowType::kFloat16:
      return dequantize_row<Float16>(values, scales, hidden, out);
  }
}

extern const RowMath kRowMath;
const RowMath kRowMath = {sum, sum_parts, scale, dot, quantize, dequantize};

}  // namespace JAX_EP_ROW_MATH_NAMESPACE
}  // namespace jax_ep
