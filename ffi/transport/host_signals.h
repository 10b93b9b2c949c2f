// Signals between CPU ranks: atomic words in window memory, and a doorbell to park on when a wait
// outlasts a short spin. Works alike in process memory and in memory shared by processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace jax_ep {

// Window memory is raw bytes; these words in it are only ever used as atomics.
inline std::atomic<uint32_t>& atomic32(char* address) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  return *reinterpret_cast<std::atomic<uint32_t>*>(address);
}
inline std::atomic<uint64_t>& atomic64(char* address) {
  static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free);
  return *reinterpret_cast<std::atomic<uint64_t>*>(address);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Brings what will soon be read into the cache; never faults.
inline void prefetch_bytes(const char* from, int64_t bytes) {
  constexpr int64_t kCacheLineBytes = 64;
  for (int64_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(from + i);
  __builtin_prefetch(from + bytes - 1);
}

// One waiter parks, many peers ring. Ringing is a fence and a load while nobody sleeps.
class Doorbell {
 public:
  explicit Doorbell(char* address) : rings_(atomic32(address)), sleepers_(atomic32(address + 4)) {}

  // Call after the release store that the sleeper waits for.
  void ring() {
    // Pairs with the fence in park(): either we see the sleeper, or it sees our store.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_relaxed) != 0) wake();
  }

  // Sleeps until rung or until `limit`, unless `ready` holds once the sleeper is announced.
  template <typename Ready>
  void park(Ready ready, std::chrono::microseconds limit) {
    sleepers_.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Acquire: `ready` must not read a word older than the ring that is counted here.
    const uint32_t rings = rings_.load(std::memory_order_acquire);
    if (!ready()) sleep(rings, limit);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void wake();
  void sleep(uint32_t rings, std::chrono::microseconds limit);

  std::atomic<uint32_t>& rings_;
  std::atomic<uint32_t>& sleepers_;
};

}  // namespace jax_ep
