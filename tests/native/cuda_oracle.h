// What the operations must give, written from the meaning of dispatch and combine alone: no window,
// no epochs, no kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <set>

#include "cuda_world.h"
#include "order_of_sum.h"

namespace jax_ep::gpu::test {

inline float read_element(const char* row, int i, RowType type) {
  if (type == RowType::kFloat32) return reinterpret_cast<const float*>(row)[i];
  if (type == RowType::kBFloat16) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  }
  return __half2float(reinterpret_cast<const __half*>(row)[i]);
}
inline void write_element(char* row, int i, RowType type, float value) {
  if (type == RowType::kFloat32) {
    reinterpret_cast<float*>(row)[i] = value;
  } else if (type == RowType::kBFloat16) {
    reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(value);
  } else {
    reinterpret_cast<__half*>(row)[i] = __float2half_rn(value);
  }
}

struct RowSource {
  int source = -1;  // -1: no token's row
  int token = 0;
  int k = 0;
};

// The truth about one set of routes.
struct Truth {
  std::vector<std::vector<int32_t>> expert;                // [rank][T * K] -1 for none
  std::vector<int64_t> faults;                             // [rank]
  std::vector<std::vector<int>> group_sizes, valid_sizes;  // [rank][E_l]
  std::vector<int> dropped;                                // [rank]
  std::vector<std::vector<RowSource>> rows;                // [rank][rows], clipped to the capacity
  std::vector<std::vector<int32_t>> row_of;  // [rank][T * K] at the expert's rank, or -1
  std::vector<int64_t> padded_rows;          // [rank], not clipped
};

inline std::vector<int32_t> valid_experts(const std::vector<int32_t>& topk, int num_experts_per_tok,
                                          int num_experts, int64_t* faults) {
  std::vector<int32_t> expert(topk.size(), -1);
  for (size_t first = 0; first < topk.size(); first += num_experts_per_tok) {
    std::set<int32_t> seen;
    for (int k = 0; k < num_experts_per_tok; ++k) {
      const int32_t e = topk[first + k];
      if (e == -1) continue;
      if (e < 0 || e >= num_experts || !seen.insert(e).second) {
        ++*faults;
      } else {
        expert[first + k] = e;
      }
    }
  }
  return expert;
}

inline Truth make_truth(World& world, int64_t capacity) {
  const Case& c = world.c();
  Truth truth;
  truth.faults.assign(c.num_ranks, 0);
  for (int r = 0; r < c.num_ranks; ++r) {
    truth.expert.push_back(valid_experts(world.rank(r).host_topk, c.num_experts_per_tok,
                                         c.num_experts, &truth.faults[r]));
    truth.row_of.emplace_back(world.entries(), -1);
  }
  std::vector<std::vector<RowSource>> of_expert(c.num_experts);
  for (int s = 0; s < c.num_ranks; ++s) {
    for (int t = 0; t < c.num_tokens; ++t) {
      for (int k = 0; k < c.num_experts_per_tok; ++k) {
        const int e = truth.expert[s][t * c.num_experts_per_tok + k];
        if (e >= 0) of_expert[e].push_back({s, t, k});
      }
    }
  }
  for (int r = 0; r < c.num_ranks; ++r) {
    std::vector<RowSource> rows;
    std::vector<int> groups, valid;
    int dropped = 0;
    for (int le = 0; le < world.experts_per_rank(); ++le) {
      const auto& list = of_expert[r * world.experts_per_rank() + le];
      const int64_t begin = static_cast<int64_t>(rows.size());
      for (const RowSource& row : list) {
        if (static_cast<int64_t>(rows.size()) < capacity) {
          truth.row_of[row.source][row.token * c.num_experts_per_tok + row.k] =
              static_cast<int32_t>(rows.size());
        } else {
          ++dropped;
        }
        rows.push_back(row);
      }
      const auto clip = [&](int64_t n) {
        return std::max<int64_t>(0, std::min(n, capacity) - begin);
      };
      valid.push_back(static_cast<int>(clip(static_cast<int64_t>(rows.size()))));
      while (rows.size() % c.alignment != 0) rows.push_back({});
      groups.push_back(static_cast<int>(clip(static_cast<int64_t>(rows.size()))));
    }
    truth.padded_rows.push_back(static_cast<int64_t>(rows.size()));
    if (static_cast<int64_t>(rows.size()) > capacity) rows.resize(capacity);
    truth.rows.push_back(rows);
    truth.group_sizes.push_back(groups);
    truth.valid_sizes.push_back(valid);
    truth.dropped.push_back(dropped);
  }
  return truth;
}

// Row of combine's result for one token, in the order that is promised.
inline std::vector<char> expected_sum(World& world, const Truth& truth, int r, int token,
                                      bool weighted) {
  const Case& c = world.c();
  const int first = token * c.num_experts_per_tok;
  std::vector<float> sum(c.hidden, 0.0f);
  std::vector<char> rounded(world.row_bytes());
  for (const int peer : order_of_sum(r, c.num_ranks)) {
    std::vector<float> part(c.hidden, 0.0f);
    std::vector<float>& to = peer == r ? sum : part;
    bool any = false;
    for (int k = 0; k < c.num_experts_per_tok; ++k) {
      const int e = truth.expert[r][first + k];
      const int row = truth.row_of[r][first + k];
      if (e < 0 || e / world.experts_per_rank() != peer || row < 0) continue;
      any = true;
      const float weight = weighted ? world.rank(r).host_topk_weights[first + k] : 1.0f;
      const char* y = world.rank(peer).host_y.data() + row * world.row_bytes();
      for (int i = 0; i < c.hidden; ++i)
        to[i] = std::fma(weight, read_element(y, i, c.type), to[i]);
    }
    if (peer == r || !any) continue;
    for (int i = 0; i < c.hidden; ++i) {
      write_element(rounded.data(), i, c.type, part[i]);
      sum[i] += read_element(rounded.data(), i, c.type);
    }
  }
  for (int i = 0; i < c.hidden; ++i) write_element(rounded.data(), i, c.type, sum[i]);
  return rounded;
}

// <y, g> in the order that is promised: 256 lanes, folded in halves.
inline float expected_dot(const char* y, const char* g, int hidden, RowType type) {
  float lane[256] = {};
  for (int i = 0; i < hidden; ++i) {
    lane[i % 256] = std::fma(read_element(y, i, type), read_element(g, i, type), lane[i % 256]);
  }
  for (int width = 128; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

}  // namespace jax_ep::gpu::test
