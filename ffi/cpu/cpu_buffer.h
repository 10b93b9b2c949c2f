// The native side of a Buffer whose devices are CPUs of this process, or of several processes of
// this host, and the registry that finds it by the id that compiled programs carry.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/group.h"
#include "transport/host_processes.h"
#include "transport/host_segment.h"
#include "transport/notice_board.h"

namespace jax_ep {

struct CpuBufferOptions {
  std::vector<std::vector<int>> device_ordinals;  // [group][rank]; of other processes' ranks: any
  int num_experts;
  int num_experts_per_tok;
  int64_t hidden;
  int itemsize;
  int tokens_per_epoch;
  int max_tokens_per_rank;
  double timeout_s;
  int64_t fingerprint;
  Payload payload = Payload::kReference;
  // Where several processes share the buffer; empty: this one has all ranks.
  std::vector<std::vector<int>> processes = {};  // [group][rank], JAX's process indices
  int here = 0;                                  // the own one
  std::string segment_offer = "";                // of the process that made it; empty: make it
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
  // By group; null where this process has no rank of it.
  std::vector<std::unique_ptr<Group>>& groups() { return groups_; }
  std::vector<Group*> groups_here() const;
  NoticeBoard& notices() { return notices_; }
  std::optional<Place> find_device(int ordinal) const;
  int64_t window_bytes() const;

  // A device that takes part in this run cannot carry out its operation: the whole run fails.
  void reject(int64_t run_id, const std::string& error);

  // For the processes that are to map our segment; empty where all is in this process.
  std::string segment_offer() const;
  // Every process has mapped the segment.
  void join();
  // Descriptions of the processes that share this buffer no more.
  std::vector<std::string> absent_processes() const;

  // Lets what was started finish. What some rank never started fails after the buffer's timeout.
  void close();
  // Throws std::runtime_error when operations are still running.
  void drain();
  // All groups healthy again; after drain() in every process.
  void reset();

 private:
  std::chrono::nanoseconds timeout() const;
  bool is_here(int group, int rank) const {
    return options_.processes.empty() || options_.processes[group][rank] == options_.here;
  }
  std::vector<int> all_processes() const;
  void share_memory();
  Membership membership_of(size_t group, char** memory) const;

  const int64_t id_;
  const CpuBufferOptions options_;
  const WindowLayout layout_;
  std::unique_ptr<HostSegment> segment_;  // null where all is in this process
  std::unique_ptr<HostProcesses> processes_;
  NoticeBoard notices_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unordered_map<int, Place> places_;
};

// An id that no buffer of this process has had.
int64_t next_cpu_buffer_id();
// agreed_id: at least next_cpu_buffer_id(), as the processes have agreed; none where the buffer is
// of this process alone, and any new id will do. Ids are never given twice in a process. Throws
// std::runtime_error where it has been given, or memory cannot be shared.
std::shared_ptr<CpuBuffer> create_cpu_buffer(std::optional<int64_t> agreed_id,
                                             const CpuBufferOptions& options);
// Null when there is no such buffer, or none any more.
std::shared_ptr<CpuBuffer> find_cpu_buffer(int64_t id);
// Nothing new is accepted from here on; idempotent.
void close_cpu_buffer(int64_t id);

}  // namespace jax_ep
