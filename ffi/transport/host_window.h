// Windows of a group whose ranks live in this process or on this host: memory of the process, or a
// part of a segment that several share, reached by pointers.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "transport/window.h"

namespace jax_ep {

class HostWindows {
 public:
  // shared: zeroed, shared_bytes(layout) on a page, the same in every process; null: memory of this
  // process. Throws std::bad_alloc when the memory cannot be had.
  explicit HostWindows(const WindowLayout& layout, char* shared = nullptr);

  static int64_t shared_bytes(const WindowLayout& layout);

  Window view(int rank) const;

  // Back to the state at creation: nothing was sent to these ranks, and they are not poisoned. The
  // caller knows that no operation is running anywhere.
  void clear_signals(const std::vector<int>& ranks);

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
