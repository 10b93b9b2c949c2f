#include "transport/host_window.h"

#include <cstring>
#include <new>

namespace jax_ep {

HostWindows::HostWindows(const WindowLayout& layout)
    : layout_(layout), control_layout_{layout.shape.num_ranks} {
  const int num_ranks = layout.shape.num_ranks;
  // A group of one rank sends nothing: it has a control block and no window.
  const int64_t data_bytes = num_ranks > 1 ? layout.total_bytes() : 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    char* data = data_bytes > 0 ? allocate(data_bytes) : nullptr;
    peers_.push_back({data, allocate(control_layout_.total_bytes())});
  }
}

char* HostWindows::allocate(int64_t bytes) {
  // calloc gives fresh zero pages that are backed only once they are touched: a window costs the
  // memory that its traffic needs.
  Memory memory(static_cast<char*>(std::calloc(1, bytes + kBufferAlignment)));
  if (memory == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  memory_.push_back(std::move(memory));
  return reinterpret_cast<char*>(align_up(static_cast<int64_t>(address), kBufferAlignment));
}

Window HostWindows::view(int rank) const {
  return {rank, layout_.shape.num_ranks, layout_, control_layout_, peers_.data()};
}

void HostWindows::clear_signals() {
  constexpr Region kSignals[] = {kDispatchCounts, kDispatchTags, kDispatchFlags,
                                 kCombineFlags,   kCombineTags,  kNotifyCounts};
  for (const PeerMemory& peer : peers_) {
    std::memset(peer.control, 0, control_layout_.total_bytes());
    if (peer.data == nullptr) continue;
    for (int parity = 0; parity < kNumBuffers; ++parity) {
      for (Region region : kSignals) {
        std::memset(peer.data + layout_.item(region, parity, 0, 0), 0,
                    region_bytes(layout_.shape, region));
      }
    }
  }
}

}  // namespace jax_ep
