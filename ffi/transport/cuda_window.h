// What one rank's GPU holds for its group: the window, which goes when the buffer is closed, and
// the memory that outlives it, because a captured graph may be replayed after that and must find
// the buffer closed.
#pragma once

#include <cstdint>
#include <memory>

#include "layout/control_block.h"
#include "layout/window_layout.h"
#include "transport/cuda_memory.h"
#include "transport/cuda_symmetric.h"
#include "transport/window.h"

namespace jax_ep::gpu {

// A group of one rank signals itself through its window but sends no payload: these regions get no
// room, and nobody may address them.
WindowLayout without_payload(const WindowLayout& layout);

class CudaWindow {
 public:
  // lasting_bytes: for the caller's own structures that must outlive the window. Throws CudaError
  // that says which settings decide the size.
  CudaWindow(int ordinal, const WindowLayout& layout, int64_t lasting_bytes);
  // In memory that somebody has taken already, of at least bytes_of_control() and the layout's
  // size.
  CudaWindow(int ordinal, const WindowLayout& layout, int64_t lasting_bytes,
             std::shared_ptr<SymmetricMemory> symmetric);

  static int64_t bytes_of_control(int num_ranks, int64_t lasting_bytes);

  PeerMemory memory() const {
    return symmetric_ ? symmetric_->own() : PeerMemory{data_.data(), control_};
  }
  char* lasting() const { return lasting_; }  // [lasting_bytes], zeroed
  int64_t data_bytes() const { return data_bytes_; }
  int64_t control_bytes() const { return control_bytes_; }

  void free_data();
  void abandon_data();

 private:
  std::shared_ptr<SymmetricMemory> symmetric_;  // or null
  DeviceMemory data_;
  int64_t data_bytes_;
  char* control_ = nullptr;
  int64_t control_bytes_ = 0;
  char* lasting_ = nullptr;
};

}  // namespace jax_ep::gpu
