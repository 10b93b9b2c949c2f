// Which of the processes that share a segment are there: each says when it comes and when it goes,
// and the kernel says when one has died.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

class HostProcesses {
 public:
  enum class State { kThere, kLeft, kDied };

  static int64_t bytes(int num_processes);

  // memory: bytes(ids.size()) of the segment. ids: JAX's process indices, ascending, the same list
  // in every process; here: the own one.
  HostProcesses(char* memory, std::vector<int> ids, int here);
  HostProcesses(const HostProcesses&) = delete;
  HostProcesses& operator=(const HostProcesses&) = delete;
  ~HostProcesses();

  // Before anybody calls watch().
  void enter();
  // After everybody has entered.
  void watch();
  // Releases all that this process wrote to the segment: it will write no more.
  void leave();

  // id: JAX's process index. Acquires what a process wrote that has left.
  State state(int id) const;
  // "process 1 (pid 4711)", and what is known of its end.
  std::string describe(int id) const;

 private:
  struct Slot;
  Slot& slot(int id) const;
  int index_of(int id) const;

  char* const memory_;
  const std::vector<int> ids_;
  const int here_;
  std::vector<int> handles_;  // by index, of watched processes; -1: none
};

}  // namespace jax_ep
