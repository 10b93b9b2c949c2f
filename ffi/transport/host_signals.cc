#include "transport/host_signals.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#else
#include <thread>
#endif

namespace jax_ep {

#if defined(__linux__)

void Doorbell::wake() {
  rings_.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::sleep(uint32_t rings, std::chrono::microseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000000) * 1000;
  syscall(SYS_futex, &rings_, FUTEX_WAIT, rings, &time, nullptr, 0);
}

#else  // No futex: sleep in slices short enough not to matter beside a scheduler's own.

void Doorbell::wake() { rings_.fetch_add(1, std::memory_order_release); }

void Doorbell::sleep(uint32_t rings, std::chrono::microseconds limit) {
  constexpr std::chrono::microseconds kSlice{50};
  const auto end = std::chrono::steady_clock::now() + limit;
  while (rings_.load(std::memory_order_acquire) == rings &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kSlice);
  }
}

#endif

}  // namespace jax_ep
