#include "transport/host_window.h"

#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ep {

namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t control_bytes(const WindowLayout& layout) {
  return align_up(ControlLayout{layout.shape.num_ranks}.total_bytes(), kBufferAlignment);
}

// Rows land all over a window: with small pages, address translation costs as much as the copies.
void prefer_huge_pages([[maybe_unused]] char* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  madvise(memory, bytes, MADV_HUGEPAGE);  // advice: where it is refused, small pages serve
#endif
}

}  // namespace

HostWindows::HostWindows(const WindowLayout& layout, char* shared)
    : layout_(layout), control_layout_{layout.shape.num_ranks} {
  const int num_ranks = layout.shape.num_ranks;
  // A group of one rank sends nothing: it has a control block and no window.
  const int64_t data_bytes = num_ranks > 1 ? layout.total_bytes() : 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (shared != nullptr) {
      peers_.push_back({shared + control_bytes(layout), shared});
      shared += control_bytes(layout) + layout.total_bytes();
      continue;
    }
    char* data = data_bytes > 0 ? allocate(data_bytes) : nullptr;
    peers_.push_back({data, allocate(control_layout_.total_bytes())});
  }
}

int64_t HostWindows::shared_bytes(const WindowLayout& layout) {
  return layout.shape.num_ranks * (control_bytes(layout) + layout.total_bytes());
}

char* HostWindows::allocate(int64_t bytes) {
  // calloc gives fresh zero pages that are backed only once they are touched: a window costs the
  // memory that its traffic needs.
  const int64_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : kBufferAlignment;
  Memory memory(static_cast<char*>(std::calloc(1, bytes + alignment)));
  if (memory == nullptr) throw std::bad_alloc();
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.get()));
  char* aligned = memory.get() + (align_up(address, alignment) - address);
  if (bytes >= kHugePageBytes) prefer_huge_pages(aligned, bytes);
  memory_.push_back(std::move(memory));
  return aligned;
}

Window HostWindows::view(int rank) const {
  return {rank, layout_.shape.num_ranks, layout_, control_layout_, peers_.data()};
}

void HostWindows::clear_signals(const std::vector<int>& ranks) {
  constexpr Region kSignals[] = {kDispatchCounts, kDispatchTags, kDispatchFlags,
                                 kCombineFlags,   kCombineTags,  kNotifyCounts};
  for (const int rank : ranks) {
    const PeerMemory& peer = peers_[rank];
    std::memset(peer.control, 0, control_layout_.total_bytes());
    if (peer.data == nullptr) continue;
    for (int parity = 0; parity < kNumBuffers; ++parity) {
      for (Region region : kSignals) {
        std::memset(peer.data + layout_.item(region, parity, 0), 0,
                    region_bytes(layout_.shape, region));
      }
    }
  }
}

}  // namespace jax_ep
