// What the compiled modules of all platforms turn into Python values, alike.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "handlers/call.h"
#include "protocol/error_record.h"
#include "transport/notice_board.h"

namespace jax_ep {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

template <class T>
nanobind::capsule to_capsule(T* pointer) {
  return nanobind::capsule(reinterpret_cast<void*>(pointer));
}

inline nanobind::dict handler_stages(Handler instantiate, Handler execute) {
  nanobind::dict stages;
  stages["instantiate"] = to_capsule(instantiate);
  stages["execute"] = to_capsule(execute);
  return stages;
}

// name: unique among all modules of a process.
inline nanobind::dict site_registration(const char* name) {
  nanobind::dict site;
  site["type_id"] = to_capsule(&Site::id);
  site["type_info"] = to_capsule(&Site::info);
  nanobind::dict types;
  types[name] = site;
  return types;
}

inline nanobind::dict to_dict(const ErrorRecord& record, int group, const std::string& message) {
  nanobind::dict entry;
  entry["kind"] = record.kind == ErrorKind::kMismatch ? "mismatch"
                  : record.kind == ErrorKind::kUsage  ? "usage"
                                                      : "timeout";
  entry["op"] = op_name(record.op);
  entry["wait"] = wait_name(record.wait);
  entry["group"] = group;
  entry["rank"] = record.rank;
  entry["peer"] = record.peer;
  entry["epoch"] = record.epoch;
  entry["expected"] = record.expected;
  entry["seen"] = record.seen;
  entry["message"] = message;
  return entry;
}

// The first fault of the data that a buffer has met; the caller adds the count.
inline nanobind::dict fault_dict(int group, int rank, int token, int k, int32_t value,
                                 bool duplicate) {
  nanobind::dict first;
  first["group"] = group;
  first["rank"] = rank;
  first["token"] = token;
  first["k"] = k;
  first["value"] = value;
  first["kind"] = duplicate ? "duplicate" : "out_of_range";
  return first;
}

// Other threads of Python run meanwhile: the operation may be waiting for one.
inline NoticeReading wait_for_notice(const NoticeBoard& board, int64_t ticket, double wait_s,
                                     std::optional<double> spin_s) {
  nanobind::gil_scoped_release release;
  const auto duration = [](double seconds) {
    return std::chrono::duration_cast<NoticeClock::duration>(
        std::chrono::duration<double>(seconds));
  };
  const NoticeClock::duration spin = spin_s ? duration(*spin_s) : NoticeBoard::kSpin;
  return board.read(static_cast<uint32_t>(ticket), NoticeClock::now() + duration(wait_s), spin);
}

inline nanobind::dict to_dict(const NoticeReading& reading) {
  const bool ready = reading.state == CounterState::kReady;
  nanobind::dict entry;
  entry["state"] = ready ? "ready" : reading.state == CounterState::kReused ? "reused" : "pending";
  entry["group"] = reading.group;
  entry["rank"] = reading.rank;
  entry["counter"] = reading.counter;
  entry["seen"] = reading.seen;
  // As Python's time.monotonic_ns() has it.
  entry["read_at_ns"] = std::chrono::nanoseconds(reading.read_at.time_since_epoch()).count();
  if (ready) {
    const size_t bytes = reading.values.size() * sizeof(uint32_t);
    entry["values"] = nanobind::bytes(reading.values.data(), bytes);
  }
  return entry;
}

template <class Buffer>
std::shared_ptr<Buffer> require_open(std::shared_ptr<Buffer> found, int64_t id) {
  if (found != nullptr) return found;
  throw nanobind::value_error(("buffer " + std::to_string(id) + " is closed").c_str());
}

// Of all groups of an open buffer.
template <class Buffer>
nanobind::list error_list(Buffer& buffer) {
  nanobind::list records;
  int group_index = 0;
  for (const auto& group : buffer.groups()) {
    if (group != nullptr) {  // this process has ranks of it
      for (const auto& [record, message] : group->error_records()) {
        records.append(to_dict(record, group_index, message));
      }
    }
    ++group_index;
  }
  return records;
}

inline void require_devices(const std::vector<std::vector<int>>& device_ordinals) {
  if (!device_ordinals.empty() && !device_ordinals[0].empty()) return;
  throw nanobind::value_error("device_ordinals must name at least one group of one device");
}

}  // namespace jax_ep
