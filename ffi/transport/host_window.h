// Windows of a group whose ranks all live in this process: plain memory, reached by pointers.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "transport/window.h"

namespace jax_ep {

class HostWindows {
 public:
  // Throws std::bad_alloc when the memory cannot be had.
  explicit HostWindows(const WindowLayout& layout);

  Window view(int rank) const;

  // Back to the state at creation: no epoch was sent, nobody is poisoned. The caller knows that no
  // operation is running.
  void clear_signals();

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<char, Free>;

  char* allocate(int64_t bytes);

  WindowLayout layout_;
  ControlLayout control_layout_;
  std::vector<Memory> memory_;
  std::vector<PeerMemory> peers_;
};

}  // namespace jax_ep
