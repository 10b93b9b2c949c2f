// The ranks whose sums make a token's, in the order that fixes its bits: the token's own first,
// then the others, ascending.
#pragma once

#include <vector>

namespace jax_ep {

inline std::vector<int> order_of_sum(int rank, int num_ranks) {
  std::vector<int> order = {rank};
  for (int other = 0; other < num_ranks; ++other) {
    if (other != rank) order.push_back(other);
  }
  return order;
}

}  // namespace jax_ep
