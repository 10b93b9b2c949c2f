#include "transport/host_processes.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#if defined(__linux__)
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_ep {

namespace {

constexpr int64_t kSlotBytes = 128;
constexpr uint32_t kEntered = 1;
constexpr uint32_t kGone = 2;

#if defined(__linux__)
#if !defined(SYS_pidfd_open)
#define SYS_pidfd_open 434  // the same on every architecture
#endif

int own_pid() { return static_cast<int>(getpid()); }

// A handle names this very process, whoever gets its number afterwards. -1 on kernels before 5.3.
int open_process(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
void close_process(int handle) {
  if (handle >= 0) close(handle);
}

bool has_died(int handle, int pid) {
  if (handle < 0) return kill(pid, 0) != 0 && errno == ESRCH;
  pollfd ended{handle, POLLIN, 0};
  return poll(&ended, 1, 0) > 0;
}
#else
int own_pid() { return 0; }
int open_process(int) { return -1; }
void close_process(int) {}
bool has_died(int, int) { return false; }
#endif

}  // namespace

struct HostProcesses::Slot {
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
};

int64_t HostProcesses::bytes(int num_processes) { return kSlotBytes * num_processes; }

HostProcesses::HostProcesses(char* memory, std::vector<int> ids, int here)
    : memory_(memory), ids_(std::move(ids)), here_(here), handles_(ids_.size(), -1) {}

HostProcesses::~HostProcesses() { std::for_each(handles_.begin(), handles_.end(), close_process); }

int HostProcesses::index_of(int id) const {
  return static_cast<int>(std::lower_bound(ids_.begin(), ids_.end(), id) - ids_.begin());
}

HostProcesses::Slot& HostProcesses::slot(int id) const {
  return *reinterpret_cast<Slot*>(memory_ + kSlotBytes * index_of(id));
}

void HostProcesses::enter() {
  slot(here_).pid.store(own_pid(), std::memory_order_relaxed);
  slot(here_).state.store(kEntered, std::memory_order_release);
}

void HostProcesses::watch() {
  for (const int id : ids_) {
    if (id != here_) handles_[index_of(id)] = open_process(slot(id).pid.load());
  }
}

void HostProcesses::leave() { slot(here_).state.store(kGone, std::memory_order_release); }

HostProcesses::State HostProcesses::state(int id) const {
  const auto left = [&] { return slot(id).state.load(std::memory_order_acquire) == kGone; };
  if (left()) return State::kLeft;
  if (id == here_ || !has_died(handles_[index_of(id)], slot(id).pid.load())) return State::kThere;
  return left() ? State::kLeft : State::kDied;
}

std::string HostProcesses::describe(int id) const {
  constexpr const char* kEnds[] = {"", ", which has closed the buffer", ", which has died"};
  return "process " + std::to_string(id) + " (pid " + std::to_string(slot(id).pid.load()) + ")" +
         kEnds[static_cast<int>(state(id))];
}

}  // namespace jax_ep
