#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>

#include "layout/window_layout.h"
#include "transport/cuda_memory.h"
#include "transport/cuda_nvshmem.h"
#include "transport/cuda_nvshmem_calls.cuh"

namespace jax_ep::gpu {

namespace nvshmem {

__device__ void put_word(uint32_t* own_word, uint32_t value, int pe) {
  nvshmem_uint32_p(own_word, value, pe);
}
__device__ void put_word(uint64_t* own_word, uint64_t value, int pe) {
  nvshmem_uint64_p(own_word, value, pe);
}

__device__ void put_warp(void* own_target, const void* source, size_t bytes, int pe) {
  nvshmemx_putmem_nbi_warp(own_target, source, bytes, pe);
}

__device__ void fence() { nvshmem_fence(); }
__device__ void quiet() { nvshmem_quiet(); }

__device__ bool test_word(uint32_t* own_word, uint32_t value) {
  return nvshmem_uint32_test(own_word, NVSHMEM_CMP_EQ, value) != 0;
}

}  // namespace nvshmem

namespace {

__global__ void store_kernel(uint32_t* own_word, uint32_t value, int pe) {
  nvshmem::put_word(own_word, value, pe);
}

__global__ void settle_kernel() { nvshmem::quiet(); }

// What this process knows of the heap. Never destroyed: NVSHMEM is not ended, since its end waits
// for processes that may have died.
struct World {
  std::mutex mutex;
  std::optional<NvshmemPlace> place;
  struct Block {
    char* data;
    int64_t bytes;
    bool taken;
  };
  std::vector<Block> windows;

  static World& instance() {
    static auto* world = new World();
    return *world;
  }
};

std::string list_of(const std::vector<int>& processes) {
  std::ostringstream text;
  for (size_t i = 0; i < processes.size(); ++i) text << (i > 0 ? ", " : "") << processes[i];
  return text.str();
}

void require_fit(const NvshmemPlace& place) {
  const int pe = nvshmem_my_pe();
  const int num_pes = nvshmem_n_pes();
  if (pe == place.pe && num_pes == static_cast<int>(place.processes.size())) return;
  std::ostringstream text;
  text << "NVSHMEM runs in this process as element " << pe << " of " << num_pes
       << ", and the buffer needs it as element " << place.pe << " of " << place.processes.size()
       << " (processes " << list_of(place.processes)
       << "). It is started once in a process: make buffers of the same processes, or let jax_ep "
          "start it";
  throw std::invalid_argument(text.str());
}

// NVSHMEM's own way in ends the process when it fails.
void start(unsigned flags, nvshmemx_init_attr_t* attributes) {
  int provided = 0;
  const nvshmemi_version_t version{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                   NVSHMEM_VENDOR_PATCH_VERSION};
  const int status =
      nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, flags, attributes, version);
  if (status == 0 && nvshmemx_init_status() > NVSHMEM_STATUS_IS_BOOTSTRAPPED) return;
  throw CudaError("NVSHMEM did not start (status " + std::to_string(status) +
                  "): NVSHMEM_DEBUG=INFO in the environment says why");
}

void start_as(const NvshmemPlace& place, const std::string& unique_id) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (unique_id.size() != sizeof(id)) {
    throw std::invalid_argument("NVSHMEM's unique id has " + std::to_string(unique_id.size()) +
                                " bytes, not " + std::to_string(sizeof(id)) +
                                ": start the same jax_ep in all processes");
  }
  std::memcpy(&id, unique_id.data(), sizeof(id));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(place.pe, static_cast<int>(place.processes.size()), &id,
                                  &attributes);
  start(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

CudaError no_room(int64_t bytes, const std::string& purpose) {
  return CudaError(purpose + " needs " + std::to_string(bytes) +
                   " bytes of NVSHMEM's heap, which has no room for them: raise "
                   "NVSHMEM_SYMMETRIC_SIZE in the environment of all processes (a buffer that is "
                   "closed leaves its window to later ones of the same size only), lower "
                   "chunk_tokens, or leave the GPU more memory with "
                   "XLA_PYTHON_CLIENT_MEM_FRACTION");
}

// One loaded later, while a peer spins, could wait for that peer.
void load_kernel(const void* kernel) {
  cudaFuncAttributes attributes;
  require_ok(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}

char* allocate(int64_t bytes, const std::string& purpose) {
  void* memory = nvshmem_align(static_cast<size_t>(kBufferAlignment), static_cast<size_t>(bytes));
  if (memory == nullptr) throw no_room(bytes, purpose);
  return static_cast<char*>(memory);
}

// A heap that grows does so in steps of this many bytes, up to as many as it has addresses for; one
// that does not was taken at the start. (Defaults of NVSHMEM 3.4: whoever sets other addresses
// knows how many.)
constexpr int64_t kHeapStep = int64_t{512} << 20;
constexpr int64_t kHeapAddresses = int64_t{128} << 30;
bool heap_grows() {
  const char* disabled = std::getenv("NVSHMEM_DISABLE_CUDA_VMM");
  return disabled == nullptr || std::strcmp(disabled, "0") == 0;
}
int64_t heap_addresses() {
  return std::getenv("NVSHMEM_MAX_MEMORY_PER_GPU") == nullptr ? kHeapAddresses : INT64_MAX;
}

}  // namespace

bool nvshmem_started() { return nvshmemx_init_status() > NVSHMEM_STATUS_IS_BOOTSTRAPPED; }

std::string nvshmem_unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) {
    throw CudaError(
        "NVSHMEM gave no unique id: NVSHMEM_DEBUG=INFO in the environment says why; "
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME names the network interface to use");
  }
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void join_nvshmem(int ordinal, const NvshmemPlace& place, const std::string& unique_id) {
  World& world = World::instance();
  std::lock_guard<std::mutex> lock(world.mutex);
  if (world.place) {
    if (world.place->processes == place.processes) return;
    throw std::invalid_argument(
        "NVSHMEM was started for processes " + list_of(world.place->processes) +
        ", once and for all, and the buffer is of processes " + list_of(place.processes) +
        ": make all buffers across nodes of the same processes");
  }
  const DeviceGuard guard(ordinal);
  require_ok(cudaFree(nullptr), "opening GPU " + std::to_string(ordinal));
  if (nvshmem_started()) {
    require_fit(place);
    start(0, nullptr);  // tells the device code of this module too
  } else {
    start_as(place, unique_id);
    require_fit(place);
  }
  load_kernel(reinterpret_cast<const void*>(store_kernel));
  load_kernel(reinterpret_cast<const void*>(settle_kernel));
  world.place = place;
}

NvshmemMemory::NvshmemMemory(int ordinal, std::vector<int> pes, bool only_puts,
                             int64_t control_bytes)
    : ordinal_(ordinal),
      pes_(std::move(pes)),
      only_puts_(only_puts),
      control_bytes_(control_bytes) {
  const DeviceGuard guard(ordinal_);
  control_ = allocate(control_bytes_, "a control block");
}

bool NvshmemMemory::needs_staging() const {
  const int own = nvshmem_my_pe();
  return std::any_of(pes_.begin(), pes_.end(), [&](int pe) {
    return pe != own && (only_puts_ || nvshmem_ptr(control_, pe) == nullptr);
  });
}

void NvshmemMemory::require_room(int64_t bytes) const {
  if (!heap_grows()) return;
  const DeviceGuard guard(ordinal_);
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  require_ok(cudaMemGetInfo(&free_bytes, &all_bytes), "asking for the GPU's free memory");
  World& world = World::instance();
  std::lock_guard<std::mutex> lock(world.mutex);
  int64_t taken = 2 * kHeapStep;  // control blocks, and what NVSHMEM itself needs
  for (const World::Block& block : world.windows) taken += block.bytes;
  const int64_t needed = align_up(bytes, kHeapStep);
  if (needed > static_cast<int64_t>(free_bytes) || needed > heap_addresses() - taken) {
    throw no_room(bytes, "a window");
  }
}

void NvshmemMemory::take_window(int64_t number, int64_t bytes) {
  World& world = World::instance();
  std::lock_guard<std::mutex> lock(world.mutex);
  if (number < 0) {
    const DeviceGuard guard(ordinal_);
    world.windows.push_back({allocate(bytes, "a window"), bytes, false});
    number = static_cast<int64_t>(world.windows.size()) - 1;
  }
  World::Block& block = world.windows.at(static_cast<size_t>(number));
  block.taken = true;
  number_ = number;
  data_ = block.data;
  data_bytes_ = block.bytes;
}

std::vector<std::pair<int64_t, int64_t>> NvshmemMemory::given_back() {
  World& world = World::instance();
  std::lock_guard<std::mutex> lock(world.mutex);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (size_t i = 0; i < world.windows.size(); ++i) {
    const World::Block& block = world.windows[i];
    if (!block.taken) found.emplace_back(static_cast<int64_t>(i), block.bytes);
  }
  return found;
}

PeerMemory NvshmemMemory::of_rank(int rank) const {
  if (pe(rank) == nvshmem_my_pe()) return own();
  if (only_puts_) return {nullptr, nullptr};
  return {static_cast<char*>(nvshmem_ptr(data_, pe(rank))),
          static_cast<char*>(nvshmem_ptr(control_, pe(rank)))};
}

void NvshmemMemory::store(int rank, char* own_word, uint32_t value, cudaStream_t stream) const {
  const DeviceGuard guard(ordinal_);
  store_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<uint32_t*>(own_word), value, pe(rank));
  require_ok(cudaGetLastError(), "storing a word in another process's control block");
}

void NvshmemMemory::settle(cudaStream_t stream) const {
  const DeviceGuard guard(ordinal_);
  settle_kernel<<<1, 1, 0, stream>>>();
  require_ok(cudaGetLastError(), "waiting for puts to arrive");
}

void NvshmemMemory::give_back() {
  if (number_ < 0) return;
  World& world = World::instance();
  std::lock_guard<std::mutex> lock(world.mutex);
  world.windows.at(static_cast<size_t>(number_)).taken = false;
  number_ = -1;
}

}  // namespace jax_ep::gpu
