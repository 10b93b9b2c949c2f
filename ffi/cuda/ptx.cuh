// Named wrappers for the instructions the kernels stand on: vector accesses with cache hints, bulk
// copies, mbarriers and fences. All inline assembly of the project is in this file.
#pragma once

#include <cstdint>
#include <cstring>
#include <cuda/atomic>
#include <cuda/ptx>

namespace jax_ep::gpu {

// Bulk copies need sm_90. Kernels that use them have an empty body on older targets; the launchers
// choose by the device's compute capability.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_EP_BULK_COPY 1
#endif

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarp = 32;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline unsigned lanes_below() { return (1u << lane_id()) - 1; }

// ---- Words that threads, blocks and ranks signal each other with.

template <cuda::thread_scope kScope, class T>
__device__ T load_acquire(const T* word) {
  return cuda::atomic_ref<T, kScope>(*const_cast<T*>(word)).load(cuda::memory_order_acquire);
}
template <cuda::thread_scope kScope, class T>
__device__ T load_relaxed(const T* word) {
  return cuda::atomic_ref<T, kScope>(*const_cast<T*>(word)).load(cuda::memory_order_relaxed);
}
template <cuda::thread_scope kScope, class T>
__device__ void store_release(T* word, T value) {
  cuda::atomic_ref<T, kScope>(*word).store(value, cuda::memory_order_release);
}
template <cuda::thread_scope kScope, class T>
__device__ void store_relaxed(T* word, T value) {
  cuda::atomic_ref<T, kScope>(*word).store(value, cuda::memory_order_relaxed);
}
constexpr cuda::thread_scope kBlockScope = cuda::thread_scope_block;
constexpr cuda::thread_scope kDeviceScope = cuda::thread_scope_device;
constexpr cuda::thread_scope kSystemScope = cuda::thread_scope_system;

// Orders everything this thread has done or observed before what it does next, for all ranks.
__device__ inline void fence_system() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
}

// A word that was loaded is not looked at before this point, so that its load may be on its way
// until then: the compiler would begin at once with what depends on nothing else.
__device__ inline void look_from_here(uint64_t* word) { asm volatile("" : "+l"(*word)); }

// What has been computed stays in registers from here on: the compiler would do it again behind the
// next barrier, for which others wait.
template <class T>
__device__ inline void settle(T* value) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, value, sizeof(T));
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word));
  memcpy(value, words, sizeof(T));
}

__device__ inline uint64_t nanoseconds() { return cuda::ptx::get_sreg_globaltimer(); }

// ---- 16-byte accesses of rows, which are touched once: they should not displace others in L1.

__device__ inline uint4 load_streaming(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
// For memory that nobody writes while the kernel runs.
__device__ inline uint4 load_constant(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ inline void store_streaming(uint4* to, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- 16 bytes at once between ranks. Each word of them is a signal of its own: relaxed accesses
// of the vector give every element the guarantees of a single relaxed access, and no order among
// them.

__device__ inline uint4 load_words(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline void store_words(void* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline ulonglong2 load_long_words(const void* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline void store_long_words(void* to, ulonglong2 v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(v.x), "l"(v.y)
               : "memory");
}

// ---- Copies of 4 or 8 bytes into shared memory that hold no register on their way.

template <class T>
__device__ inline void copy_async(T* shared, const T* global) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(sizeof(T))
               : "memory");
}
// This thread's copies are there, for this thread.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if defined(JAX_EP_BULK_COPY)

// ---- mbarriers, which count arrivals and the bytes of bulk loads.

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  cuda::ptx::mbarrier_init(barrier, arrivals);
}
// Makes initialised barriers visible to bulk copies; a block barrier must follow.
__device__ inline void barrier_init_fence() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}
__device__ inline void barrier_arrive(uint64_t* barrier) { cuda::ptx::mbarrier_arrive(barrier); }
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                       cuda::ptx::space_shared, barrier, bytes);
}
// Without arriving.
__device__ inline void barrier_expect_more(uint64_t* barrier, uint32_t bytes) {
  cuda::ptx::mbarrier_expect_tx(cuda::ptx::sem_relaxed, cuda::ptx::scope_cta,
                                cuda::ptx::space_shared, barrier, bytes);
}
__device__ inline bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  return cuda::ptx::mbarrier_test_wait_parity(barrier, parity);
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// ---- Bulk copies. Addresses and sizes are multiples of 16 bytes.

__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes,
                                 uint64_t* barrier) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, global, bytes,
                           barrier);
}
__device__ inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, global, shared, bytes);
}
// For rows that this kernel does not read again: L2 gives their lines up first.
__device__ inline void bulk_store_evict_first(void* global, const void* shared, uint32_t bytes) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(bytes), "l"(policy)
      : "memory");
}
// Groups are per thread: each lane that stores commits and waits for its own.
__device__ inline void bulk_commit() { cuda::ptx::cp_async_bulk_commit_group(); }
// All but the latest kPending groups have been written.
template <int kPending>
__device__ void bulk_wait() {
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<kPending>{});
}
// All but the latest kPending groups have been read from shared memory.
template <int kPending>
__device__ void bulk_wait_read() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kPending>{});
}

// Shared memory written by this thread, before a bulk copy reads or overwrites it. The fence
// without a state space costs combine half its speed (measured), so each use names its own.
__device__ inline void fence_bulk_shared() {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}
// Global memory acquired by this thread, before a bulk copy reads it.
__device__ inline void fence_bulk_global() {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
}

#endif  // JAX_EP_BULK_COPY

}  // namespace jax_ep::gpu
