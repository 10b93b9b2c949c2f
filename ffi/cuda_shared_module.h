// What the modules of GPUs have in common: the targets, and the life of buffers once they are made.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_buffer.h"
#include "handlers/cuda_handlers.h"
#include "handlers/cuda_low_latency.h"
#include "shared_module.h"

namespace jax_ep::gpu {

inline nanobind::dict handlers_of_operations() {
  nanobind::dict targets;
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

inline std::shared_ptr<CudaBuffer> require_buffer(int64_t id) {
  return require_open(find_cuda_buffer(id), id);
}

inline void close_buffer(int64_t id) {
  nanobind::gil_scoped_release release;
  close_cuda_buffer(id);
}

inline std::vector<std::string> absent_processes(int64_t id) {
  std::vector<std::string> absent;
  for (const auto& group : require_buffer(id)->groups()) {
    for (int rank : group->ranks_gone()) {
      absent.push_back("the process of rank " + std::to_string(rank) + ", which has closed it");
    }
  }
  return absent;
}

inline void drain_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nanobind::gil_scoped_release release;
  buffer->require_idle();
}

inline void reset_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nanobind::gil_scoped_release release;
  buffer->reset();
}

inline nanobind::dict stats(int64_t id) {
  auto buffer = require_buffer(id);
  uint64_t dispatch_epochs = 0;
  uint64_t combine_epochs = 0;
  {
    nanobind::gil_scoped_release release;
    for (const auto& group : buffer->groups()) {
      dispatch_epochs += group->epochs(kDispatchChannel);
      combine_epochs += group->epochs(kCombineChannel);
    }
  }
  nanobind::dict result;
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

inline nanobind::object take_data_faults(int64_t id) {
  auto buffer = require_buffer(id);
  int64_t count = 0;
  nanobind::dict first;
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
  if (count == 0) return nanobind::none();
  first["count"] = count;
  return first;
}

inline nanobind::list error_records(int64_t id) { return error_list(*require_buffer(id)); }

inline int64_t next_ticket(int64_t id) { return require_buffer(id)->notices().next_ticket(); }

inline nanobind::dict read_notice(int64_t id, int64_t ticket, double wait_s,
                                  std::optional<double> spin_s) {
  auto buffer = require_buffer(id);
  return to_dict(wait_for_notice(buffer->notices(), ticket, wait_s, spin_s));
}

template <class Module>
void define_buffers(Module& m) {
  using namespace nanobind::literals;
  m.def("absent_processes", &absent_processes, "id"_a);
  m.def("drain_buffer", &drain_buffer, "id"_a);
  m.def("close_buffer", &close_buffer, "id"_a);
  m.def("reset_buffer", &reset_buffer, "id"_a);
  m.def("window_bytes", [](int64_t id) { return require_buffer(id)->window_bytes(); }, "id"_a);
  m.def("stats", &stats, "id"_a);
  m.def("take_data_faults", &take_data_faults, "id"_a);
  m.def("error_records", &error_records, "id"_a);
  m.def("next_ticket", &next_ticket, "id"_a);
  m.def("read_notice", &read_notice, "id"_a, "ticket"_a, "wait_s"_a, "spin_s"_a = nanobind::none());
  m.attr("num_notice_slots") = jax_ep::kNoticeSlots;
  m.def("default_num_sms", &default_num_sms, "device_sms"_a);
  m.def("most_num_sms", &most_num_sms, "device_sms"_a);
  m.attr("has_test_hooks") = false;
}

}  // namespace jax_ep::gpu
