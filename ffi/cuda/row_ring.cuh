// Rows on their way into a thread's registers, through shared memory: a copy holds no register
// while it lasts, so that all rows of an item can be under way before the first is used.
#pragma once

#include "cuda/ll_payload.cuh"

namespace jax_ep::gpu {

// A thread's columns of the rows of a list, asked for and taken in its order. Each thread reads
// what it copied itself, so nothing has to be synchronised.
template <int kUnits>
class RowRing {
 public:
  static constexpr int kDepth = 6;
  static constexpr int kBytesPerThread = kDepth * kUnits * 16;

  // at: kBytesPerThread for each thread of the block.
  __device__ explicit RowRing(char* at) : ring_(reinterpret_cast<uint4*>(at) + threadIdx.x) {}

  // Asks for rows [first, end) of the list, once all rows asked for before have been taken.
  // address_of(i): row i of the list.
  template <class AddressOf>
  __device__ void begin(const LlItem& item, int first, int end, AddressOf address_of) {
    next_ = first;
    end_ = end;
    slot_ = 0;
#pragma unroll 1
    for (int slot = 0; slot < kDepth; ++slot) ask(item, slot, address_of);
  }

  // Waits for the next row, and asks for another in its place.
  template <class AddressOf>
  __device__ LlColumns<kUnits> take(const LlItem& item, AddressOf address_of) {
    wait_for_async_copies<kDepth - 1>();
    LlColumns<kUnits> columns = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (item.has(u)) columns.v[u] = *place(slot_, u);
    }
    ask(item, slot_, address_of);
    slot_ = slot_ + 1 == kDepth ? 0 : slot_ + 1;
    return columns;
  }

 private:
  __device__ uint4* place(int slot, int unit) const {
    return ring_ + (slot * kUnits + unit) * static_cast<int>(blockDim.x);
  }
  // One group of copies a row, also where there is none: their number says which rows have come.
  template <class AddressOf>
  __device__ void ask(const LlItem& item, int slot, AddressOf address_of) {
    if (next_ < end_) {
      const auto* row = reinterpret_cast<const uint4*>(address_of(next_));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (item.has(u)) copy_async(place(slot, u), row + item.column_of(u));
      }
      ++next_;
    }
    commit_async_copies();
  }

  uint4* const ring_;  // [kDepth, kUnits, threads of the block]
  int next_ = 0;       // to ask for
  int end_ = 0;
  int slot_ = 0;  // of the next row to take
};

}  // namespace jax_ep::gpu
