// Counters that a device writes and the host reads without asking the device.
#pragma once

#include <cstdint>
#include <utility>

#include "protocol/notice.h"

namespace jax_ep {

// Owns the words and knows both sides' addresses of them. Words begin as 0.
class MappedCounters {
 public:
  using Release = void (*)(HostWords);

  MappedCounters(HostWords host, DeviceWords device, Release release)
      : host_(host), device_(device), release_(release) {}
  ~MappedCounters() {
    if (exist()) release_(host_);
  }
  MappedCounters(MappedCounters&& other) noexcept
      : host_(std::exchange(other.host_, {})), device_(other.device_), release_(other.release_) {}
  MappedCounters(const MappedCounters&) = delete;
  MappedCounters& operator=(const MappedCounters&) = delete;
  MappedCounters& operator=(MappedCounters&&) = delete;

  // Of a rank in another process: that one has them.
  static MappedCounters none() { return MappedCounters({}, {}, nullptr); }

  bool exist() const { return host_.first != nullptr; }
  HostWords host() const { return host_; }
  DeviceWords device() const { return device_; }

 private:
  HostWords host_;
  DeviceWords device_;
  Release release_;
};

// For ranks that are CPUs: both sides are this process.
MappedCounters make_process_counters(int64_t num_words);

// How such a rank writes counter number `index`. A later notice keeps its place: two programs of
// one device may run in another order than their notices were made.
void store_counter(DeviceWords words, int64_t index, uint32_t ticket, uint64_t value);

}  // namespace jax_ep
