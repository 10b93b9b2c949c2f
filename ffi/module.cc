// The Python module jax_ep._ffi_cpu: registrations for XLA, the life of native buffers, and the
// window's layout. Imported by jax_ep/_native.py only.
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu_buffer.h"
#include "handlers/cpu_handlers.h"
#include "handlers/cpu_low_latency.h"
#include "layout/seed_layout.h"
#include "layout/window_layout.h"
#include "shared_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_ep {
namespace {

nb::dict registrations() {
  nb::dict targets;
  targets["jax_ep_dispatch"] = handler_stages(jax_ep_instantiate, jax_ep_dispatch_cpu);
  targets["jax_ep_dispatch_float8"] =
      handler_stages(jax_ep_instantiate, jax_ep_dispatch_float8_cpu);
  targets["jax_ep_dispatch_routed"] =
      handler_stages(jax_ep_instantiate, jax_ep_dispatch_routed_cpu);
  targets["jax_ep_dispatch_routed_float8"] =
      handler_stages(jax_ep_instantiate, jax_ep_dispatch_routed_float8_cpu);
  targets["jax_ep_notify"] = handler_stages(jax_ep_instantiate, jax_ep_notify_cpu);
  targets["jax_ep_combine"] = handler_stages(jax_ep_instantiate, jax_ep_combine_cpu);
  targets["jax_ep_combine_grad"] = handler_stages(jax_ep_instantiate, jax_ep_combine_grad_cpu);
  const std::pair<const char*, Handler> low_latency[] = {
      {"jax_ep_ll_dispatch", jax_ep_ll_dispatch_cpu},
      {"jax_ep_ll_dispatch_start", jax_ep_ll_dispatch_start_cpu},
      {"jax_ep_ll_dispatch_done", jax_ep_ll_dispatch_done_cpu},
      // The handlers of rows as they are: one result more where scales come back.
      {"jax_ep_ll_dispatch_float8", jax_ep_ll_dispatch_cpu},
      {"jax_ep_ll_dispatch_float8_start", jax_ep_ll_dispatch_start_cpu},
      {"jax_ep_ll_dispatch_float8_done", jax_ep_ll_dispatch_done_cpu},
      {"jax_ep_ll_combine", jax_ep_ll_combine_cpu},
      {"jax_ep_ll_combine_start", jax_ep_ll_combine_start_cpu},
      {"jax_ep_ll_combine_done", jax_ep_ll_combine_done_cpu},
      {"jax_ep_ll_combine_grad", jax_ep_ll_combine_grad_cpu}};
  for (const auto& [name, handler] : low_latency) {
    targets[name] = handler_stages(jax_ep_instantiate, handler);
  }
  return targets;
}

nb::dict type_registrations() { return site_registration("jax_ep_site"); }

std::shared_ptr<CpuBuffer> require_buffer(int64_t id) {
  return require_open(find_cpu_buffer(id), id);
}

int64_t create_buffer(std::vector<std::vector<int>> device_ordinals, int num_experts,
                      int num_experts_per_tok, int64_t hidden, int itemsize, int tokens_per_epoch,
                      int max_tokens_per_rank, double timeout_s, int64_t fingerprint,
                      const std::string& payload, std::optional<int64_t> id,
                      std::vector<std::vector<int>> processes, int here,
                      const std::string& segment_offer) {
  require_devices(device_ordinals);
  if (payload != "window" && payload != "reference") {
    throw nb::value_error(("payload is 'window' or 'reference', not '" + payload + "'").c_str());
  }
  const Payload carried = payload == "window" ? Payload::kWindow : Payload::kReference;
  nb::gil_scoped_release release;
  return create_cpu_buffer(id, {std::move(device_ordinals), num_experts, num_experts_per_tok,
                                hidden, itemsize, tokens_per_epoch, max_tokens_per_rank, timeout_s,
                                fingerprint, carried, std::move(processes), here, segment_offer})
      ->id();
}

void join_buffer(int64_t id) { require_buffer(id)->join(); }

void close_buffer(int64_t id) {
  nb::gil_scoped_release release;
  close_cpu_buffer(id);
}

void drain_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nb::gil_scoped_release release;
  buffer->drain();
}

void reset_buffer(int64_t id) {
  auto buffer = require_buffer(id);
  nb::gil_scoped_release release;
  buffer->drain();
  buffer->reset();
}

nb::dict stats(int64_t id) {
  auto buffer = require_buffer(id);
  uint64_t dispatch_epochs = 0;
  uint64_t combine_epochs = 0;
  for (Group* group : buffer->groups_here()) {
    dispatch_epochs += group->epochs(kDispatchChannel);
    combine_epochs += group->epochs(kCombineChannel);
  }
  nb::dict result;
  result["num_groups"] = buffer->groups().size();
  result["num_ranks"] = buffer->num_ranks();
  result["window_bytes"] = buffer->window_bytes();
  result["dispatch_epochs"] = dispatch_epochs;
  result["combine_epochs"] = combine_epochs;
  return result;
}

nb::object take_data_faults(int64_t id) {
  auto buffer = require_buffer(id);
  int64_t count = 0;
  nb::dict first;
  int group_index = 0;
  for (auto& group : buffer->groups()) {
    auto found = group != nullptr ? group->take_data_faults() : std::nullopt;
    if (found) {
      const auto& [rank, fault] = *found;
      if (count == 0) {
        first = fault_dict(group_index, rank, fault.token, fault.k, fault.value,
                           fault.kind == RouteFault::kDuplicate);
      }
      count += fault.count;
    }
    ++group_index;
  }
  if (count == 0) return nb::none();
  first["count"] = count;
  return first;
}

nb::list error_records(int64_t id) { return error_list(*require_buffer(id)); }

int64_t next_ticket(int64_t id) { return require_buffer(id)->notices().next_ticket(); }

nb::dict read_notice(int64_t id, int64_t ticket, double wait_s, std::optional<double> spin_s) {
  auto buffer = require_buffer(id);
  return to_dict(wait_for_notice(buffer->notices(), ticket, wait_s, spin_s));
}

std::string payload(int64_t id) {
  const bool window = require_buffer(id)->options().payload == Payload::kWindow;
  return window ? "window" : "reference";
}

// Regions of one buffer as (name, offset, bytes), and the totals.
nb::dict window_layout(int num_ranks, int tokens_per_epoch, int num_experts,
                       int num_experts_per_tok, int64_t row_bytes, bool staging, bool records) {
  const WindowLayout layout = WindowLayout::make(
      {num_ranks, tokens_per_epoch, num_experts, num_experts_per_tok, row_bytes, staging, records});
  nb::list regions;
  for (int r = 0; r < kNumRegions; ++r) {
    const auto region = static_cast<Region>(r);
    regions.append(
        nb::make_tuple(region_name(region), layout.offset[r], region_bytes(layout.shape, region)));
  }
  nb::dict result;
  result["message_bytes"] = layout.shape.message().bytes();
  result["regions"] = regions;
  result["buffer_bytes"] = layout.buffer_bytes;
  result["total_bytes"] = layout.total_bytes();
  result["control_bytes"] = ControlLayout{num_ranks}.total_bytes();
  return result;
}

nb::dict seed_layout(int64_t tokens, int64_t row_bytes, int64_t num_ranks) {
  const SeedLayout seed = SeedLayout::make(tokens, row_bytes, num_ranks);
  nb::dict result;
  result["message_bytes"] = seed.message_bytes;
  result["sizes"] = std::vector<int64_t>(seed.size, seed.size + SeedLayout::kNumRegions);
  result["region_sum"] = seed.region_sum;
  result["buffer_bytes"] = seed.buffer_bytes;
  result["total_bytes"] = seed.total_bytes;
  return result;
}

#if defined(JAX_EP_TEST_HOOKS)
constexpr bool kHasTestHooks = true;

void set_fault(int64_t id, const std::string& kind, int rank, int group, int64_t microseconds) {
  auto buffer = require_buffer(id);
  FaultPlan& plan = buffer->groups().at(group)->fault_plan(rank);
  plan.microseconds = microseconds;
  if (kind == "skip_send") {
    plan.kind = FaultKind::kSkipSend;
  } else if (kind == "wrong_tag") {
    plan.kind = FaultKind::kWrongTag;
  } else if (kind == "late") {
    plan.kind = FaultKind::kLate;
  } else if (kind == "jitter") {
    plan.kind = FaultKind::kJitter;
  } else if (kind == "none") {
    plan.kind = FaultKind::kNone;
  } else {
    throw nb::value_error(("unknown fault kind: " + kind).c_str());
  }
}
#else
constexpr bool kHasTestHooks = false;
#endif

}  // namespace

NB_MODULE(_ffi_cpu, m) {
  m.def("registrations", &registrations);
  m.def("type_registrations", &type_registrations);
  m.def("create_buffer", &create_buffer, nb::kw_only(), "device_ordinals"_a, "num_experts"_a,
        "num_experts_per_tok"_a, "hidden"_a, "itemsize"_a, "tokens_per_epoch"_a,
        "max_tokens_per_rank"_a, "timeout_s"_a, "fingerprint"_a, "payload"_a = "reference",
        "id"_a = nb::none(), "processes"_a = std::vector<std::vector<int>>{}, "here"_a = 0,
        "segment_offer"_a = "");
  m.def("next_buffer_id", &next_cpu_buffer_id);
  m.def("segment_offer", [](int64_t id) { return require_buffer(id)->segment_offer(); }, "id"_a);
  m.def("join_buffer", &join_buffer, "id"_a);
  m.def(
      "absent_processes", [](int64_t id) { return require_buffer(id)->absent_processes(); },
      "id"_a);
  m.def("drain_buffer", &drain_buffer, "id"_a);
  m.def("close_buffer", &close_buffer, "id"_a);
  m.def("reset_buffer", &reset_buffer, "id"_a);
  m.def("window_bytes", [](int64_t id) { return require_buffer(id)->window_bytes(); }, "id"_a);
  m.def("payload", &payload, "id"_a);
  m.def("stats", &stats, "id"_a);
  m.def("take_data_faults", &take_data_faults, "id"_a);
  m.def("error_records", &error_records, "id"_a);
  m.def("next_ticket", &next_ticket, "id"_a);
  m.def("read_notice", &read_notice, "id"_a, "ticket"_a, "wait_s"_a, "spin_s"_a = nb::none());
  m.attr("num_notice_slots") = kNoticeSlots;
  m.def("window_layout", &window_layout, nb::kw_only(), "num_ranks"_a, "tokens_per_epoch"_a,
        "num_experts"_a, "num_experts_per_tok"_a, "row_bytes"_a, "staging"_a, "records"_a = false);
  m.def("seed_layout", &seed_layout, nb::kw_only(), "tokens"_a, "row_bytes"_a, "num_ranks"_a);
  m.attr("has_test_hooks") = kHasTestHooks;
#if defined(JAX_EP_TEST_HOOKS)
  m.def("set_fault", &set_fault, "id"_a, "kind"_a, "rank"_a, nb::kw_only(), "group"_a = 0,
        "microseconds"_a = 0);
#endif
}

}  // namespace jax_ep
