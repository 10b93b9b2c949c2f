// Random worlds for protocol_stress: shapes, fresh inputs of all ranks, and where every row must
// end up, found by putting rows down one by one. Shares nothing with ffi/ but the structs of
// arguments.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "layout/regions.h"
#include "protocol/numeric.h"

namespace jax_ep::stress {

using Random = std::mt19937_64;

inline int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
inline bool chance(Random& random, int percent) { return draw(random, 1, 100) <= percent; }

// --- Row elements, converted by exact arithmetic in double
struct Format {
  int bytes;
  int digits;        // of the significand, the hidden one included
  int min_exponent;  // of normal numbers
  double largest;
};
inline Format format_of(RowType type) {
  if (type == RowType::kBFloat16) return {2, 8, -126, 0x1.FEp127};
  if (type == RowType::kFloat16) return {2, 11, -14, 65504.0};
  return {4, 24, -126, double{std::numeric_limits<float>::max()}};
}

// Nearest number of the format, ties to even.
inline double round_to(const Format& format, double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int quantum = std::max(std::ilogb(value), format.min_exponent) - (format.digits - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  return std::abs(rounded) > format.largest ? std::copysign(INFINITY, value) : rounded;
}

inline double get(RowType type, const char* row, int64_t index) {
  if (type == RowType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row + 2 * index, 2);
  const int exponent_bits = type == RowType::kBFloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    value = std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

inline void put(RowType type, char* row, int64_t index, double value) {
  if (type == RowType::kFloat32) {
    const float single = static_cast<float>(value);
    std::memcpy(row + 4 * index, &single, 4);
    return;
  }
  // Every number of a 16-bit format is a float32; its bits follow from the value alone.
  const Format format = format_of(type);
  const double magnitude = std::abs(round_to(format, value));
  const int fraction_bits = format.digits - 1;
  const int top = ((1 << (15 - fraction_bits)) - 1) << fraction_bits;
  int bits;
  if (std::isnan(magnitude)) {
    bits = top | 1;
  } else if (std::isinf(magnitude)) {
    bits = top;
  } else if (magnitude < std::ldexp(1.0, format.min_exponent)) {
    bits = static_cast<int>(std::ldexp(magnitude, fraction_bits - format.min_exponent));
  } else {
    const int exponent = std::ilogb(magnitude);
    const int scaled = static_cast<int>(std::ldexp(magnitude, fraction_bits - exponent));
    bits = ((exponent - format.min_exponent) << fraction_bits) + scaled;
  }
  const auto out = static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
  std::memcpy(row + 2 * index, &out, 2);
}

// --- Worlds and rounds
struct World {
  WindowShape shape;
  RowType row_type;
  int64_t hidden;

  int num_ranks() const { return shape.num_ranks; }
  int topk() const { return shape.num_experts_per_tok; }
  std::string describe() const {
    return "R=" + std::to_string(num_ranks()) + " C=" + std::to_string(shape.tokens_per_epoch) +
           " E=" + std::to_string(shape.num_experts) + " K=" + std::to_string(topk()) +
           " H=" + std::to_string(hidden) + " type=" + std::to_string(static_cast<int>(row_type));
  }
};

inline World random_world(Random& random) {
  const int rank_choices[] = {2, 2, 3, 4, 4, 5, 8, 1};
  const int num_ranks = rank_choices[draw(random, 0, 7)];
  const int local = static_cast<int>(draw(random, 1, 4));
  const int num_experts = num_ranks * local;
  const int most = std::min(num_experts, kMaxExpertsPerTok);
  const auto type = static_cast<RowType>(draw(random, 0, 2));
  // Mostly short rows; sometimes longer than the tile in which rows are summed.
  const int64_t row_bytes = 16 * (chance(random, 10) ? draw(random, 60, 140) : draw(random, 1, 8));
  return {{num_ranks, static_cast<int>(draw(random, 1, 9)), num_experts,
           static_cast<int>(chance(random, 15) ? most : draw(random, 1, std::min(most, 4))),
           row_bytes, /*staging=*/chance(random, 20)},
          type,
          row_bytes / row_type_bytes(type)};
}

template <typename T>
using ByRank = std::vector<std::vector<T>>;

struct Round {
  int num_tokens;
  int64_t capacity;
  int64_t alignment;
  bool zero_tail;
  bool weighted;
  bool with_scalars;
  bool hostile;   // the handle is garbage
  bool expanded;  // otherwise dispatch gives slots, and combine sums slots

  ByRank<char> x;              // [T, H]
  ByRank<int32_t> topk_idx;    // [T, K], with faults
  ByRank<float> topk_weights;  // [T, K]
  ByRank<char> y;              // [capacity, H]
  ByRank<char> y_slots;        // [R * T, H]
  ByRank<float> row_weights;   // [capacity]
  ByRank<float> row_scalars;   // [capacity]
  ByRank<char> g;              // [T, H]

  // The truth about dispatch.
  ByRank<int32_t> clean_idx;    // [T, K]
  ByRank<int32_t> recv_rows;    // [R * T, K]
  ByRank<int32_t> group_sizes;  // [E_l]
  ByRank<int32_t> valid_sizes;  // [E_l]
  std::vector<int32_t> num_dropped;
  int64_t num_faults = 0;

  // The handle that combine and its gradient are given: the truth, or garbage.
  ByRank<int32_t> handle_idx;
  ByRank<int32_t> handle_rows;
};

inline std::vector<char> random_rows(Random& random, const World& world, int64_t rows) {
  std::vector<char> out(rows * world.shape.row_bytes);
  std::uniform_real_distribution<double> uniform(-2, 2);
  for (int64_t i = 0; i < rows * world.hidden; ++i) {
    const int odd = static_cast<int>(draw(random, 0, 999));
    const double scale = odd == 0 ? 0x1p-18 : odd == 1 ? 0x1p15 : 1.0;  // subnormal, near overflow
    put(world.row_type, out.data(), i, uniform(random) * scale);
  }
  return out;
}

inline std::vector<float> random_floats(Random& random, int64_t size) {
  std::vector<float> out(size);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (float& value : out) value = uniform(random);
  return out;
}

inline std::vector<int32_t> random_topk(Random& random, const World& world, int num_tokens) {
  std::vector<int32_t> out;
  std::vector<int32_t> experts(world.shape.num_experts);
  for (size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<int32_t>(i);
  const bool faulty = chance(random, 30);
  for (int token = 0; token < num_tokens; ++token) {
    std::shuffle(experts.begin(), experts.end(), random);
    const size_t first = out.size();
    for (int k = 0; k < world.topk(); ++k) {
      out.push_back(chance(random, 20) ? -1 : experts[k]);
      if (!faulty || !chance(random, 10)) continue;
      const int32_t faults[] = {world.shape.num_experts, INT32_MAX, INT32_MIN, -2, out[first]};
      out.back() = faults[draw(random, 0, 4)];
    }
  }
  return out;
}

// Fills in the truth: every row of every rank, one after another.
inline void place_rows(const World& world, Round* round) {
  const int topk = world.topk();
  const int local = world.shape.experts_per_rank();
  const int64_t handle_rows = int64_t{world.num_ranks()} * round->num_tokens;
  for (const auto& idx : round->topk_idx) {
    std::vector<int32_t> clean = idx;
    for (size_t entry = 0; entry < idx.size(); ++entry) {
      const auto first = idx.begin() + static_cast<int64_t>(entry / topk) * topk;
      const bool repeated =
          std::find(first, idx.begin() + entry, idx[entry]) != idx.begin() + entry;
      if (idx[entry] == -1) continue;
      if (idx[entry] >= 0 && idx[entry] < world.shape.num_experts && !repeated) continue;
      clean[entry] = -1;
      ++round->num_faults;
    }
    round->clean_idx.push_back(clean);
  }
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    std::vector<int32_t> rows(handle_rows * topk, -1);
    std::vector<int32_t> groups, valids;
    int32_t dropped = 0;
    int64_t row = 0;
    for (int expert = rank * local; expert < (rank + 1) * local; ++expert) {
      int group = 0, valid = 0;
      const int64_t begin = row;
      for (int64_t entry = 0; entry < handle_rows * topk; ++entry) {
        const int64_t per_rank = int64_t{round->num_tokens} * topk;
        if (round->clean_idx[entry / per_rank][entry % per_rank] != expert) continue;
        const bool fits = row < round->capacity;
        if (fits) rows[entry] = static_cast<int32_t>(row);
        valid += fits;
        dropped += !fits;
        group += row++ < round->capacity;
      }
      while ((row - begin) % round->alignment != 0) group += row++ < round->capacity;
      groups.push_back(group);
      valids.push_back(valid);
    }
    round->recv_rows.push_back(rows);
    round->group_sizes.push_back(groups);
    round->valid_sizes.push_back(valids);
    round->num_dropped.push_back(dropped);
  }
}

// What combine and its gradient work on. Rows that hold no token are NaN: reading one shows.
inline void make_combine_inputs(Random& random, const World& world, Round* round) {
  round->handle_idx = round->clean_idx;
  round->handle_rows = round->recv_rows;
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    round->y.push_back(random_rows(random, world, round->capacity));
    const int64_t num_slots = int64_t{world.num_ranks()} * round->num_tokens;
    round->y_slots.push_back(random_rows(random, world, round->expanded ? 0 : num_slots));
    round->row_weights.push_back(random_floats(random, round->capacity));
    round->row_scalars.push_back(random_floats(random, round->capacity));
    round->g.push_back(random_rows(random, world, round->num_tokens));
    if (round->hostile) {
      const int32_t odd[] = {INT32_MIN, INT32_MAX, static_cast<int32_t>(round->capacity), -2};
      for (int32_t& row : round->handle_rows[rank]) {
        const auto any = static_cast<int32_t>(draw(random, -3, round->capacity + 2));
        row = chance(random, 25) ? odd[draw(random, 0, 3)] : any;
      }
      for (int32_t& expert : round->handle_idx[rank]) {
        const auto any = static_cast<int32_t>(draw(random, -3, world.shape.num_experts + 2));
        expert = chance(random, 25) ? odd[draw(random, 0, 3)] : any;
      }
      continue;
    }
    for (int64_t slot = 0; slot < num_slots && !round->expanded; ++slot) {
      const auto rows = round->recv_rows[rank].begin() + slot * world.topk();
      if (std::any_of(rows, rows + world.topk(), [](int32_t row) { return row >= 0; })) continue;
      std::memset(&round->y_slots[rank][slot * world.shape.row_bytes], 0xFF, world.shape.row_bytes);
    }
    std::vector<bool> held(round->capacity, false);
    for (int32_t row : round->recv_rows[rank]) {
      if (row >= 0) held[row] = true;
    }
    for (int64_t row = 0; row < round->capacity; ++row) {
      if (held[row]) continue;
      std::memset(&round->y[rank][row * world.shape.row_bytes], 0xFF, world.shape.row_bytes);
      round->row_weights[rank][row] = round->row_scalars[rank][row] = NAN;
    }
  }
}

inline Round random_round(Random& random, const World& world) {
  const int carried = world.shape.tokens_per_epoch;
  Round round{};
  round.num_tokens = static_cast<int>(chance(random, 12)   ? 0
                                      : chance(random, 50) ? draw(random, 1, carried)
                                                           : draw(random, 1, 4 * carried + 1));
  round.alignment = chance(random, 60) ? 1 : draw(random, 2, 5);
  const int local = world.shape.experts_per_rank();
  const int64_t worst =
      int64_t{world.num_ranks()} * round.num_tokens * std::min(world.topk(), local) +
      local * (round.alignment - 1);
  const int64_t most = std::max<int64_t>(1, align_up(worst, round.alignment) / round.alignment);
  round.capacity = round.alignment * (chance(random, 70) ? most : draw(random, 1, most));
  round.zero_tail = chance(random, 70);
  round.weighted = chance(random, 60);
  round.with_scalars = chance(random, 50);
  round.hostile = chance(random, 10);
  round.expanded = chance(random, 70);
  if (!round.expanded) {
    round.weighted = false;
    round.with_scalars = true;
  }
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    round.x.push_back(random_rows(random, world, round.num_tokens));
    round.topk_idx.push_back(random_topk(random, world, round.num_tokens));
    round.topk_weights.push_back(random_floats(random, int64_t{round.num_tokens} * world.topk()));
  }
  place_rows(world, &round);
  make_combine_inputs(random, world, &round);
  return round;
}

inline std::vector<Round> random_rounds(Random& random, const World& world) {
  std::vector<Round> rounds(static_cast<size_t>(draw(random, 4, 16)));
  for (Round& round : rounds) round = random_round(random, world);
  return rounds;
}

}  // namespace jax_ep::stress
