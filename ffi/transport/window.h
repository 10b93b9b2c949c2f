// A rank's view of its group's windows: the one type that the protocol's code sees, whatever
// carries the bytes. Peers that can be addressed directly have pointers here.
#pragma once

#include <cstdint>

#include "layout/control_block.h"
#include "layout/window_layout.h"

namespace jax_ep {

struct PeerMemory {
  char* data;     // the peer's window: two buffers, WindowLayout::total_bytes()
  char* control;  // the peer's control block: ControlLayout::total_bytes()
};

struct Window {
  int rank;
  int num_ranks;
  WindowLayout layout;
  ControlLayout control_layout;
  const PeerMemory* peers;  // [num_ranks], the own rank's included

  JAX_EP_HD char* data(int peer, int64_t offset) const { return peers[peer].data + offset; }
  JAX_EP_HD char* control(int peer, int64_t offset) const { return peers[peer].control + offset; }
};

}  // namespace jax_ep
