// The Python module jax_ep._ffi_cuda: registrations for XLA and the life of native buffers on GPUs.
// Importing it needs no GPU and no driver. Imported by jax_ep/_native.py only.
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_shared_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_ep::gpu {
namespace {

nb::dict registrations() { return handlers_of_operations(); }

nb::dict type_registrations() { return site_registration("jax_ep_site_cuda"); }

int64_t create_buffer(std::vector<std::vector<int>> device_ordinals, int num_experts,
                      int num_experts_per_tok, int64_t hidden, int itemsize, int tokens_per_epoch,
                      int max_tokens_per_rank, double timeout_s, int64_t fingerprint, int num_sms,
                      bool low_latency, std::optional<int64_t> id) {
  require_devices(device_ordinals);
  nb::gil_scoped_release release;
  return create_cuda_buffer(id, {std::move(device_ordinals), num_experts, num_experts_per_tok,
                                 hidden, itemsize, tokens_per_epoch, max_tokens_per_rank, timeout_s,
                                 fingerprint, num_sms, low_latency})
      ->id();
}

// Of a buffer that several processes share: what the others need of this one's windows, and what
// all have offered.
nb::bytes memory_offer(int64_t id) {
  const std::string offer = require_buffer(id)->offer();
  return nb::bytes(offer.data(), offer.size());
}

void join_buffer(int64_t id, const std::vector<nb::bytes>& offers) {
  auto buffer = require_buffer(id);
  std::vector<std::string> bytes;
  for (const nb::bytes& offer : offers) bytes.emplace_back(offer.c_str(), offer.size());
  nb::gil_scoped_release release;
  buffer->join(bytes);
}

}  // namespace
}  // namespace jax_ep::gpu

NB_MODULE(_ffi_cuda, m) {
  using namespace jax_ep::gpu;
  m.def("registrations", &registrations);
  m.def("type_registrations", &type_registrations);
  m.def("create_buffer", &create_buffer, nb::kw_only(), "device_ordinals"_a, "num_experts"_a,
        "num_experts_per_tok"_a, "hidden"_a, "itemsize"_a, "tokens_per_epoch"_a,
        "max_tokens_per_rank"_a, "timeout_s"_a, "fingerprint"_a, "num_sms"_a = 0,
        "low_latency"_a = false, "id"_a = nb::none());
  m.def("next_buffer_id", &next_cuda_buffer_id);
  m.def("memory_offer", &memory_offer, "id"_a);
  m.def("join_buffer", &join_buffer, "id"_a, "offers"_a);
  define_buffers(m);
}
