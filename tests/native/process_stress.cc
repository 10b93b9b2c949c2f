// Stress of the CPU protocol with ranks in several processes: fresh random worlds, whose ranks are
// dealt out to forked processes that share a group's memory, every result checked against an
// independent one, until enough epochs have passed.
//
// Usage: process_stress SEED EPOCHS
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <new>

#include "stress_group.h"
#include "stress_main.h"
#include "transport/host_processes.h"

namespace jax_ep::stress {
namespace {

// What the processes of one world share beside the group's memory.
struct Shared {
  std::atomic<int> num_arrived;
  std::atomic<int64_t> num_faults;

  // Until `count` have come, over all calls so far.
  bool meet(int count) {
    ++num_arrived;
    const auto end = std::chrono::steady_clock::now() + 2 * kTimeout;
    while (num_arrived.load() < count) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }
};

struct Plan {
  World world;
  std::vector<int> process_of;  // by rank
  int num_processes;
  Payload payload;
  bool jitter;
  std::vector<Round> rounds[2];  // a reset lies between them
};

Plan random_plan(Random& random) {
  Plan plan;
  do {
    plan.world = random_world(random);
  } while (plan.world.num_ranks() < 2);
  plan.num_processes = static_cast<int>(draw(random, 2, std::min(plan.world.num_ranks(), 3)));
  for (int rank = 0; rank < plan.world.num_ranks(); ++rank) plan.process_of.push_back(rank);
  for (int& process : plan.process_of) process %= plan.num_processes;  // none is without a rank
  std::shuffle(plan.process_of.begin(), plan.process_of.end(), random);
  plan.payload = chance(random, 50) ? Payload::kWindow : Payload::kReference;
  plan.jitter = chance(random, 50);
  for (std::vector<Round>& rounds : plan.rounds) rounds = random_rounds(random, plan.world);
  return plan;
}

// The life of one process; its exit status.
int run_process(const Plan& plan, int here, char* memory, Shared* shared, Random random) {
  std::vector<int> ids;
  for (int process = 0; process < plan.num_processes; ++process) ids.push_back(process);
  HostProcesses processes(memory, ids, here);
  processes.enter();
  int meetings = 0;
  const auto meet = [&] {
    if (!shared->meet(plan.num_processes * ++meetings)) failures.add("a process did not come");
  };
  meet();
  processes.watch();
  Membership membership{plan.process_of, here, &processes,
                        memory + align_up(HostProcesses::bytes(plan.num_processes), 4096)};
  const std::vector<int> ranks = membership.ranks_here(plan.world.num_ranks());
  Group group(WindowLayout::make(plan.world.shape), kTimeout, plan.payload, membership);
  for (const std::vector<Round>& rounds : plan.rounds) {
    shared->num_faults +=
        run_ranks(group, plan.world, rounds, ranks, Order::kChannel, random, plan.jitter);
    meet();
    if (failures.any()) return 1;
    group.reset();
    meet();
  }
  processes.leave();
  return failures.any() ? 1 : 0;
}

// Returns epochs passed, both channels together.
int64_t run_world(Random& random) {
  const Plan plan = random_plan(random);
  const int64_t bytes = align_up(HostProcesses::bytes(plan.num_processes), 4096) +
                        Membership::bytes(WindowLayout::make(plan.world.shape));
  const auto map = [](int64_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  };
  void* memory = map(bytes);
  auto* shared = new (map(4096)) Shared{};
  std::vector<pid_t> children;
  for (int process = 0; process < plan.num_processes; ++process) {
    Random own(random());
    children.push_back(fork());
    if (children.back() == 0) {
      const int status = run_process(plan, process, static_cast<char*>(memory), shared, own);
      std::fflush(stdout);
      _exit(status);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) failures.add("a process ended with status " + std::to_string(status));
  }
  int64_t epochs = 0, faults = 0;
  for (const std::vector<Round>& rounds : plan.rounds) {
    for (const Round& round : rounds) epochs += 3 * epochs_of(plan.world, round);
    faults += faults_of(rounds);
  }
  if (!failures.any() && shared->num_faults != faults) failures.add("data faults miscounted");
  munmap(memory, bytes);
  munmap(shared, 4096);
  return epochs;
}

}  // namespace
}  // namespace jax_ep::stress

int main(int argc, char** argv) {
  return jax_ep::stress::run_worlds(argc, argv, jax_ep::stress::run_world);
}
