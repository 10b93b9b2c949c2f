// The Python module jax_ep._ffi_nvshmem: as _ffi_cuda, for GPUs of processes that reach each other
// over NVSHMEM. Importing it needs NVSHMEM's host library, no GPU and no driver. Imported by
// jax_ep/_native.py only.
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_shared_module.h"
#include "transport/cuda_nvshmem.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_ep::gpu {
namespace {

// Far from the ids of the other modules' buffers.
constexpr int64_t kFirstNvshmemId = (int64_t{1} << 33) + 1;

// Memory taken for buffers that are about to be made, by their ids.
class Reservations {
 public:
  static Reservations& instance() {
    static auto* reservations = new Reservations();
    return *reservations;
  }
  void add(int64_t id, std::shared_ptr<NvshmemMemory> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_[id] = std::move(memory);
  }
  std::shared_ptr<NvshmemMemory> find(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = memory_.find(id);
    if (it == memory_.end()) throw std::invalid_argument("no memory is reserved for this buffer");
    return it->second;
  }
  void remove(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.erase(id);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<NvshmemMemory>> memory_;
};

nb::dict registrations() { return handlers_of_operations(); }

nb::dict type_registrations() { return site_registration("jax_ep_site_nvshmem"); }

int64_t next_buffer_id() { return std::max(kFirstNvshmemId, next_cuda_buffer_id()); }

nb::bytes unique_id() {
  const std::string id = nvshmem_unique_id();
  return nb::bytes(id.data(), id.size());
}

void join_world(int ordinal, std::vector<int> processes, int pe, const nb::bytes& unique_id) {
  const std::string id(unique_id.c_str(), unique_id.size());
  nb::gil_scoped_release release;
  join_nvshmem(ordinal, {std::move(processes), pe}, id);
}

// Whether the buffer's window needs send regions, as far as this process sees.
bool reserve_control(int64_t id, int ordinal, std::vector<int> pes, bool only_puts) {
  nb::gil_scoped_release release;
  const int64_t bytes = CudaRank::symmetric_control_bytes(static_cast<int>(pes.size()));
  auto memory = std::make_shared<NvshmemMemory>(ordinal, std::move(pes), only_puts, bytes);
  Reservations::instance().add(id, memory);
  return memory->needs_staging();
}

// Not collective: whether a new window will find room, as far as this process sees.
void require_room(int64_t id, int64_t bytes) {
  nb::gil_scoped_release release;
  Reservations::instance().find(id)->require_room(bytes);
}

void reserve_window(int64_t id, int64_t number, int64_t bytes) {
  nb::gil_scoped_release release;
  Reservations::instance().find(id)->take_window(number, bytes);
}

// For a buffer that is not made after all.
void drop_reservation(int64_t id) { Reservations::instance().remove(id); }

int64_t create_buffer(std::vector<std::vector<int>> device_ordinals, int num_experts,
                      int num_experts_per_tok, int64_t hidden, int itemsize, int tokens_per_epoch,
                      int max_tokens_per_rank, double timeout_s, int64_t fingerprint, int num_sms,
                      bool low_latency, bool staging, int64_t id) {
  require_devices(device_ordinals);
  nb::gil_scoped_release release;
  std::shared_ptr<NvshmemMemory> memory = Reservations::instance().find(id);
  Reservations::instance().remove(id);
  auto buffer =
      create_cuda_buffer(id, {std::move(device_ordinals), num_experts, num_experts_per_tok, hidden,
                              itemsize, tokens_per_epoch, max_tokens_per_rank, timeout_s,
                              fingerprint, num_sms, low_latency, staging, std::move(memory)});
  buffer->join_symmetric();
  return id;
}

}  // namespace
}  // namespace jax_ep::gpu

NB_MODULE(_ffi_nvshmem, m) {
  using namespace jax_ep::gpu;
  m.def("registrations", &registrations);
  m.def("type_registrations", &type_registrations);
  m.def("is_started", &nvshmem_started);
  m.def("unique_id", &unique_id);
  m.def("join_world", &join_world, nb::kw_only(), "ordinal"_a, "processes"_a, "pe"_a,
        "unique_id"_a);
  m.def("reserve_control", &reserve_control, nb::kw_only(), "id"_a, "ordinal"_a, "pes"_a,
        "only_puts"_a);
  m.def("windows_given_back", &NvshmemMemory::given_back);
  m.def("require_room", &require_room, nb::kw_only(), "id"_a, "bytes"_a);
  m.def("reserve_window", &reserve_window, nb::kw_only(), "id"_a, "number"_a, "bytes"_a);
  m.def("drop_reservation", &drop_reservation, "id"_a);
  m.def("create_buffer", &create_buffer, nb::kw_only(), "device_ordinals"_a, "num_experts"_a,
        "num_experts_per_tok"_a, "hidden"_a, "itemsize"_a, "tokens_per_epoch"_a,
        "max_tokens_per_rank"_a, "timeout_s"_a, "fingerprint"_a, "num_sms"_a = 0,
        "low_latency"_a = false, "staging"_a = false, "id"_a);
  m.def("next_buffer_id", &next_buffer_id);
  define_buffers(m);
}
