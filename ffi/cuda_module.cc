// The Python module jax_ep._ffi_cuda: registrations for XLA and the life of native buffers on GPUs.
// Importing it needs no GPU and no driver. Imported by jax_ep/_native.py only.
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_buffer.h"
#include "handlers/cuda_handlers.h"
#include "handlers/cuda_low_latency.h"
#include "shared_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_ep::gpu {
namespace {

nb::dict registrations() {
  nb::dict targets;
  targets["jax_ep_dispatch"] = handler_stages(jax_ep_instantiate_cuda, jax_ep_dispatch_cuda);
  targets["jax_ep_dispatch_routed"] =
      handler_stages(jax_ep_instantiate_cuda, jax_ep_dispatch_routed_cuda);
  targets["jax_ep_dispatch_float8"] =
      handler_stages(jax_ep_instantiate_cuda, jax_ep_dispatch_float8_cuda);
  targets["jax_ep_dispatch_routed_float8"] =
      handler_stages(jax_ep_instantiate_cuda, jax_ep_dispatch_routed_float8_cuda);
  targets["jax_ep_notify"] = handler_stages(jax_ep_instantiate_cuda, jax_ep_notify_cuda);
  targets["jax_ep_combine"] = handler_stages(jax_ep_instantiate_cuda, jax_ep_combine_cuda);
  targets["jax_ep_combine_grad"] =
      handler_stages(jax_ep_instantiate_cuda, jax_ep_combine_grad_cuda);
  const std::pair<const char*, Handler> low_latency[] = {
      {"jax_ep_ll_dispatch", jax_ep_ll_dispatch_cuda},
      {"jax_ep_ll_dispatch_start", jax_ep_ll_dispatch_start_cuda},
      {"jax_ep_ll_dispatch_done", jax_ep_ll_dispatch_done_cuda},
      {"jax_ep_ll_dispatch_float8", jax_ep_ll_dispatch_cuda},
      {"jax_ep_ll_dispatch_float8_start", jax_ep_ll_dispatch_start_cuda},
      {"jax_ep_ll_dispatch_float8_done", jax_ep_ll_dispatch_done_cuda},
      {"jax_ep_ll_combine", jax_ep_ll_combine_cuda},
      {"jax_ep_ll_combine_start", jax_ep_ll_combine_start_cuda},
      {"jax_ep_ll_combine_done", jax_ep_ll_combine_done_cuda},
      {"jax_ep_ll_combine_grad", jax_ep_ll_combine_grad_cuda}};
  for (const auto& [name, handler] : low_latency) {
    targets[name] = handler_stages(jax_ep_instantiate_cuda, handler);
  }
  return targets;
}

nb::dict type_registrations() { return site_registration("jax_ep_site_cuda"); }

std::shared_ptr<CudaBuffer> require_buffer(int64_t id) {
  return require_open(find_cuda_buffer(id), id);
}

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

void close_buffer(int64_t id) {
  nb::gil_scoped_release release;
  close_cuda_buffer(id);
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

std::vector<std::string> absent_processes(int64_t id) {
  std::vector<std::string> absent;
  for (const auto& group : require_buffer(id)->groups()) {
    for (int rank : group->ranks_gone()) {
      absent.push_back("the process of rank " + std::to_string(rank) + ", which has closed it");
    }
  }
  return absent;
}

void drain_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nb::gil_scoped_release release;
  buffer->require_idle();
}

void reset_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nb::gil_scoped_release release;
  buffer->reset();
}

nb::dict stats(int64_t id) {
  auto buffer = require_buffer(id);
  uint64_t dispatch_epochs = 0;
  uint64_t combine_epochs = 0;
  {
    nb::gil_scoped_release release;
    for (const auto& group : buffer->groups()) {
      dispatch_epochs += group->epochs(kDispatchChannel);
      combine_epochs += group->epochs(kCombineChannel);
    }
  }
  nb::dict result;
  result["num_groups"] = buffer->groups().size();
  result["num_ranks"] = buffer->num_ranks();
  result["window_bytes"] = buffer->window_bytes();
  result["dispatch_epochs"] = dispatch_epochs;
  result["combine_epochs"] = combine_epochs;
  result["num_sms"] = buffer->num_sms();
  result["launches"] = buffer->num_launches.load();
  result["captured_launches"] = buffer->num_captures.load();
  result["notify_returned_ns"] = buffer->notify_returned_ns.load();
  return result;
}

nb::object take_data_faults(int64_t id) {
  auto buffer = require_buffer(id);
  int64_t count = 0;
  nb::dict first;
  int group_index = 0;
  for (const auto& group : buffer->groups()) {
    if (const auto faults = group->take_data_faults()) {
      const auto& [rank, group_count, fault] = *faults;
      if (count == 0) {
        first = fault_dict(group_index, rank, fault.token, fault.k, fault.value, fault.duplicate);
      }
      count += group_count;
    }
    ++group_index;
  }
  if (count == 0) return nb::none();
  first["count"] = count;
  return first;
}

nb::list error_records(int64_t id) { return error_list(*require_buffer(id)); }

int64_t next_ticket(int64_t id) { return require_buffer(id)->notices().next_ticket(); }

nb::dict read_notice(int64_t id, int64_t ticket, double wait_s) {
  auto buffer = require_buffer(id);
  return to_dict(wait_for_notice(buffer->notices(), ticket, wait_s));
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
  m.def("absent_processes", &absent_processes, "id"_a);
  m.def("drain_buffer", &drain_buffer, "id"_a);
  m.def("close_buffer", &close_buffer, "id"_a);
  m.def("reset_buffer", &reset_buffer, "id"_a);
  m.def("window_bytes", [](int64_t id) { return require_buffer(id)->window_bytes(); }, "id"_a);
  m.def("stats", &stats, "id"_a);
  m.def("take_data_faults", &take_data_faults, "id"_a);
  m.def("error_records", &error_records, "id"_a);
  m.def("next_ticket", &next_ticket, "id"_a);
  m.def("read_notice", &read_notice, "id"_a, "ticket"_a, "wait_s"_a);
  m.attr("num_notice_slots") = jax_ep::kNoticeSlots;
  m.def("default_num_sms", &default_num_sms, "device_sms"_a);
  m.def("most_num_sms", &most_num_sms, "device_sms"_a);
  m.attr("has_test_hooks") = false;
}
