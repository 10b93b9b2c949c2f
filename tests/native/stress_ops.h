// One rank's part of each operation for protocol_stress: poisoned outputs, arguments, and the check
// of what came out against sums made by the words of the specification.
#pragma once

#include <string>
#include <vector>

#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "order_of_sum.h"
#include "stress_check.h"

namespace jax_ep::stress {

// --- dispatch
class DispatchPart {
 public:
  DispatchPart(const World& world, const Round& round, int rank)
      : world_(world),
        round_(round),
        rank_(rank),
        x_(round.x[rank].data(), round.num_tokens * world.shape.row_bytes),
        num_slots_(int64_t{world.num_ranks()} * round.num_tokens),
        tokens_(
            poisoned<char>((round.expanded ? round.capacity : num_slots_) * world.shape.row_bytes)),
        row_map_(poisoned<int32_t>(round.capacity)),
        weights_(poisoned<float>(round.capacity)),
        group_sizes_(poisoned<int32_t>(world.shape.experts_per_rank())),
        valid_sizes_(group_sizes_),
        clean_idx(poisoned<int32_t>(int64_t{round.num_tokens} * world.topk())),
        recv_rows(poisoned<int32_t>(world.num_ranks() * int64_t{round.num_tokens} * world.topk())) {
  }

  DispatchArgs args() {
    return {x_.data(),
            round_.topk_idx[rank_].data(),
            round_.topk_weights[rank_].data(),
            tokens_.data(),
            weights_.data(),
            group_sizes_.data(),
            valid_sizes_.data(),
            &num_dropped_,
            clean_idx.data(),
            recv_rows.data(),
            round_.num_tokens,
            round_.capacity,
            round_.alignment,
            round_.zero_tail,
            round_.expanded ? nullptr : row_map_.data()};
  }

  void fill_operands() { x_.fill(); }
  void take_back_operands() { x_.take_back(); }

  std::string check() const {
    Findings findings;
    findings.expect(clean_idx == round_.clean_idx[rank_], "topk_idx is not as sanitised");
    findings.expect(group_sizes_ == round_.group_sizes[rank_], "group_sizes differ");
    findings.expect(valid_sizes_ == round_.valid_sizes[rank_], "valid_sizes differ");
    findings.expect(num_dropped_ == round_.num_dropped[rank_], "num_dropped is ", num_dropped_,
                    ", not ", round_.num_dropped[rank_]);
    findings.expect(recv_rows == round_.recv_rows[rank_], "recv_rows differ");
    std::vector<bool> held(round_.capacity, false), sent(num_slots_, false);
    const std::vector<int32_t>& rows = round_.recv_rows[rank_];
    const int64_t per_rank = int64_t{round_.num_tokens} * world_.topk();
    for (size_t entry = 0; entry < rows.size(); ++entry) {
      if (rows[entry] < 0) continue;
      const int64_t source = static_cast<int64_t>(entry) / per_rank;
      const int64_t local = static_cast<int64_t>(entry) % per_rank;
      const int64_t slot = static_cast<int64_t>(entry) / world_.topk();
      const int64_t bytes = world_.shape.row_bytes;
      const int64_t at = round_.expanded ? rows[entry] : slot;
      held[rows[entry]] = sent[slot] = true;
      findings.expect(std::memcmp(&tokens_[at * bytes],
                                  &round_.x[source][local / world_.topk() * bytes], bytes) == 0,
                      "tokens row ", at, " is not token ", local / world_.topk(), " of rank ",
                      source);
      findings.expect(round_.expanded || row_map_[rows[entry]] == slot, "row_map differs");
      findings.expect(weights_[rows[entry]] == round_.topk_weights[source][local],
                      "weights differ");
    }
    for (int64_t row = 0; row < round_.capacity; ++row) {
      if (held[row]) continue;
      findings.expect(weights_[row] == 0, "weight of empty row ", row, " is ", weights_[row]);
      findings.expect(round_.expanded || row_map_[row] == num_slots_, "row_map of empty row ", row,
                      " is ", row_map_[row]);
      if (!round_.expanded) continue;
      const bool written = round_.zero_tail || row < end_of_groups(round_, rank_);
      findings.expect_empty(world_, tokens_, row, written, "tokens");
    }
    for (int64_t slot = 0; slot < num_slots_ && !round_.expanded; ++slot) {
      if (!sent[slot]) findings.expect_empty(world_, tokens_, slot, true, "slot");
    }
    return findings.first();
  }

 private:
  const World& world_;
  const Round& round_;
  const int rank_;
  Lent<char> x_;
  const int64_t num_slots_;
  std::vector<char> tokens_;
  std::vector<int32_t> row_map_;
  std::vector<float> weights_;
  std::vector<int32_t> group_sizes_;
  std::vector<int32_t> valid_sizes_;
  int32_t num_dropped_ = -77;

 public:
  std::vector<int32_t> clean_idx;
  std::vector<int32_t> recv_rows;
};

// --- combine
class CombinePart {
 public:
  // idx [T, K] and rows [R * T, K]: the handle, dispatch's own results or the round's.
  CombinePart(const World& world, const Round& round, int rank, const int32_t* idx,
              const int32_t* rows)
      : world_(world),
        round_(round),
        rank_(rank),
        idx_(idx),
        rows_(rows, world.num_ranks() * int64_t{round.num_tokens} * world.topk()),
        y_((round.expanded ? round.y : round.y_slots)[rank].data(),
           (round.expanded ? round.capacity : int64_t{world.num_ranks()} * round.num_tokens) *
               world.shape.row_bytes),
        row_weights_(round.row_weights[rank].data(), round.capacity),
        row_scalars_(round.row_scalars[rank].data(), round.capacity),
        out_(poisoned<char>(round.num_tokens * world.shape.row_bytes)),
        scalars_(poisoned<float>(int64_t{round.num_tokens} * world.topk())) {}

  CombineArgs args() {
    return {y_.data(),
            round_.weighted ? row_weights_.data() : nullptr,
            round_.with_scalars ? row_scalars_.data() : nullptr,
            idx_,
            rows_.data(),
            out_.data(),
            round_.with_scalars ? scalars_.data() : nullptr,
            round_.num_tokens,
            round_.capacity,
            world_.row_type,
            world_.hidden,
            round_.expanded};
  }

  void fill_operands() {
    y_.fill();
    row_weights_.fill();
    row_scalars_.fill();
    rows_.fill();
  }
  void take_back_operands() {
    y_.take_back();
    row_weights_.take_back();
    row_scalars_.take_back();
    rows_.take_back();
  }

  std::string check() const {
    Findings findings;
    for (int token = 0; token < round_.num_tokens; ++token) {
      findings.expect_row(world_, &out_[token * world_.shape.row_bytes], sum_of(token), "out",
                          token);
      for (int k = 0; round_.with_scalars && k < world_.topk(); ++k) {
        const float seen = scalars_[int64_t{token} * world_.topk() + k];
        const double expected = scalar_of(token, k);
        findings.expect(same(seen, expected), "scalar of token ", token, ", k=", k, " is ", seen,
                        ", not ", expected);
      }
    }
    return findings.first();
  }

 private:
  int owner_of(int token, int k) const {
    const int32_t expert = round_.handle_idx[rank_][int64_t{token} * world_.topk() + k];
    const bool real = expert >= 0 && expert < world_.shape.num_experts;
    return real ? expert / world_.shape.experts_per_rank() : -1;
  }
  int32_t row_of(int owner, int token, int k) const {
    const int64_t slot = int64_t{rank_} * round_.num_tokens + token;
    const int32_t row = round_.handle_rows[owner][slot * world_.topk() + k];
    return row >= 0 && row < round_.capacity ? row : -1;
  }

  // k ascending on the owner, rounded for the way unless it is this rank.
  std::vector<double> sum_of(int token) const {
    std::vector<float> total(world_.hidden, 0.0f);
    for (const int owner : order_of_sum(rank_, world_.num_ranks())) {
      bool named = false;
      for (int k = 0; k < world_.topk(); ++k) named |= owner_of(token, k) == owner;
      if (!named) continue;
      std::vector<float> part(world_.hidden, 0.0f);
      std::vector<float>& sum = owner == rank_ ? total : part;
      for (int k = 0; k < world_.topk(); ++k) {
        const int32_t row = row_of(owner, token, k);
        if (row < 0) continue;
        const float weight = round_.weighted ? round_.row_weights[owner][row] : 1.0f;
        const int64_t slot = int64_t{rank_} * round_.num_tokens + token;
        const char* y = round_.expanded ? &round_.y[owner][row * world_.shape.row_bytes]
                                        : &round_.y_slots[owner][slot * world_.shape.row_bytes];
        for (int64_t j = 0; j < world_.hidden; ++j) {
          sum[j] = std::fma(weight, static_cast<float>(get(world_.row_type, y, j)), sum[j]);
        }
        if (!round_.expanded) break;
      }
      if (owner == rank_) continue;
      for (int64_t j = 0; j < world_.hidden; ++j) {
        total[j] += static_cast<float>(round_to(format_of(world_.row_type), part[j]));
      }
    }
    std::vector<double> rounded;
    for (float value : total) rounded.push_back(round_to(format_of(world_.row_type), value));
    return rounded;
  }

  double scalar_of(int token, int k) const {
    const int owner = owner_of(token, k);
    const int32_t row = owner < 0 ? -1 : row_of(owner, token, k);
    return row < 0 ? 0.0 : round_.row_scalars[owner][row];
  }

  const World& world_;
  const Round& round_;
  const int rank_;
  const int32_t* idx_;
  Lent<int32_t> rows_;
  Lent<char> y_;
  Lent<float> row_weights_;
  Lent<float> row_scalars_;
  std::vector<char> out_;
  std::vector<float> scalars_;
};

// --- combine_grad
class GradPart {
 public:
  GradPart(const World& world, const Round& round, int rank, const int32_t* idx,
           const int32_t* rows)
      : world_(world),
        round_(round),
        rank_(rank),
        idx_(idx),
        rows_(rows),
        g_(round.g[rank].data(), round.num_tokens * world.shape.row_bytes),
        d_y_(poisoned<char>(round.capacity * world.shape.row_bytes)),
        d_weights_(poisoned<float>(round.capacity)) {}

  CombineGradArgs args() {
    return {g_.data(),
            idx_,
            rows_,
            round_.row_weights[rank_].data(),
            round_.y[rank_].data(),
            d_y_.data(),
            d_weights_.data(),
            round_.num_tokens,
            round_.capacity,
            round_.alignment,
            round_.zero_tail,
            world_.row_type,
            world_.hidden};
  }

  void fill_operands() { g_.fill(); }
  void take_back_operands() { g_.take_back(); }

  std::string check() const {
    // Per row: how often the handle names it, and the last (source, token) that does.
    std::vector<int> named(round_.capacity, 0);
    std::vector<int64_t> slot_of(round_.capacity, -1);
    int64_t last = -1;
    for (int64_t slot = 0; slot < int64_t{world_.num_ranks()} * round_.num_tokens; ++slot) {
      for (int k = 0; k < world_.topk() && sent(slot); ++k) {
        const int32_t row = round_.handle_rows[rank_][slot * world_.topk() + k];
        if (row < 0 || row >= round_.capacity) continue;
        ++named[row];
        slot_of[row] = slot;
        last = std::max<int64_t>(last, row);
      }
    }
    Findings findings;
    const int64_t end = std::min(align_up(last + 1, round_.alignment), round_.capacity);
    for (int64_t row = 0; row < round_.capacity; ++row) {
      if (named[row] == 0) {
        findings.expect(d_weights_[row] == 0, "d_row_weights[", row, "] of an empty row is ",
                        d_weights_[row]);
        findings.expect_empty(world_, d_y_, row, row < end || round_.zero_tail, "d_y");
      } else if (named[row] == 1) {
        check_row(row, slot_of[row], &findings);
      }
    }
    return findings.first();
  }

 private:
  // Whether the source's handle says that this rank needs its token.
  bool sent(int64_t slot) const {
    const int64_t source = slot / round_.num_tokens;
    const int64_t token = slot % round_.num_tokens;
    if (source == rank_) return true;
    for (int k = 0; k < world_.topk(); ++k) {
      const int32_t expert = round_.handle_idx[source][token * world_.topk() + k];
      if (expert >= 0 && expert / world_.shape.experts_per_rank() == rank_) return true;
    }
    return false;
  }

  void check_row(int64_t row, int64_t slot, Findings* findings) const {
    const int64_t bytes = world_.shape.row_bytes;
    const char* g = &round_.g[slot / round_.num_tokens][slot % round_.num_tokens * bytes];
    const char* y = &round_.y[rank_][row * bytes];
    std::vector<double> expected;
    std::vector<float> lanes(kDotLanes, 0.0f);
    for (int64_t j = 0; j < world_.hidden; ++j) {
      const auto g_j = static_cast<float>(get(world_.row_type, g, j));
      const auto y_j = static_cast<float>(get(world_.row_type, y, j));
      const float product = round_.row_weights[rank_][row] * g_j;
      expected.push_back(round_to(format_of(world_.row_type), product));
      lanes[j % kDotLanes] = std::fma(y_j, g_j, lanes[j % kDotLanes]);
    }
    while (lanes.size() > 1) {
      const size_t half = lanes.size() / 2;
      for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
      lanes.resize(half);
    }
    findings->expect_row(world_, &d_y_[row * bytes], expected, "d_y", row);
    findings->expect(same(d_weights_[row], lanes[0]), "d_row_weights[", row, "] is ",
                     d_weights_[row], ", not ", lanes[0]);
  }

  const World& world_;
  const Round& round_;
  const int rank_;
  const int32_t* idx_;
  const int32_t* rows_;
  Lent<char> g_;
  std::vector<char> d_y_;
  std::vector<float> d_weights_;
};

}  // namespace jax_ep::stress
