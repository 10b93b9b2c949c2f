// The native side of a Buffer whose devices are CPUs of this process, and the registry that finds
// it by the id that compiled programs carry.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/group.h"
#include "transport/notice_board.h"

namespace jax_ep {

struct CpuBufferOptions {
  std::vector<std::vector<int>> device_ordinals;  // [group][rank]
  int num_experts;
  int num_experts_per_tok;
  int64_t hidden;
  int itemsize;
  int tokens_per_epoch;
  int max_tokens_per_rank;
  double timeout_s;
  int64_t fingerprint;
  Payload payload = Payload::kReference;
};

class CpuBuffer {
 public:
  struct Place {
    int group;
    int rank;
  };

  CpuBuffer(int64_t id, const CpuBufferOptions& options);

  int64_t id() const { return id_; }
  const CpuBufferOptions& options() const { return options_; }
  const WindowLayout& layout() const { return layout_; }
  int num_ranks() const { return layout_.shape.num_ranks; }
  std::vector<std::unique_ptr<Group>>& groups() { return groups_; }
  NoticeBoard& notices() { return notices_; }
  std::optional<Place> find_device(int ordinal) const;
  int64_t window_bytes() const;

  // A device that takes part in this run cannot carry out its operation: the whole run fails.
  void reject(int64_t run_id, const std::string& error);

  // Lets what was started finish. What some rank never started fails after the buffer's timeout.
  void close();
  // All groups healthy again. Throws std::runtime_error when operations are still running.
  void reset();

 private:
  std::chrono::nanoseconds timeout() const;

  const int64_t id_;
  const CpuBufferOptions options_;
  const WindowLayout layout_;
  NoticeBoard notices_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unordered_map<int, Place> places_;
};

// Ids are never given twice in a process.
std::shared_ptr<CpuBuffer> create_cpu_buffer(const CpuBufferOptions& options);
// Null when there is no such buffer, or none any more.
std::shared_ptr<CpuBuffer> find_cpu_buffer(int64_t id);
// Nothing new is accepted from here on; idempotent.
void close_cpu_buffer(int64_t id);

}  // namespace jax_ep
