// Operations in which a rank is late, silent or somewhere else. Whoever fails and whoever does not:
// operands are freed as soon as their rank is told, and nobody may read them then.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/group.h"
#include "stress_ops.h"
#include "stress_report.h"

namespace jax_ep::stress {

constexpr std::chrono::milliseconds kShortTimeout{30};

// Counts the ranks that are told the end of one operation, and which of them with an error.
class Ends {
 public:
  explicit Ends(int num_ranks) : times_(num_ranks, 0), failed_(num_ranks, false) {}
  void add(int rank, bool failed) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++times_[rank];
    failed_[rank] = failed;
    changed_.notify_one();
  }
  // Whether each rank was told, once, within the limit.
  bool wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kTimeout, [&] {
      return std::all_of(times_.begin(), times_.end(), [](int times) { return times == 1; });
    });
  }
  bool failed(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_[rank];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> times_;
  std::vector<bool> failed_;
};

template <class Part, class Run>
void run_faulty(Group& group, const World& world, std::vector<std::unique_ptr<Part>>& parts,
                const OpTag& tag, Channel channel, int num_epochs, int silent, Run run) {
  Ends ends(world.num_ranks());
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    Part* part = parts[rank].get();
    part->fill_operands();
    Operation operation;
    operation.tag = tag;
    operation.channel = channel;
    operation.num_epochs = num_epochs;
    operation.operands = part->args().view();
    operation.run = [args = part->args(), run](auto& context, auto& sent, uint64_t epoch) {
      return run(context, args, sent, epoch);
    };
    operation.done = [&ends, part, rank](const std::string* error) {
      part->take_back_operands();
      ends.add(rank, error != nullptr);
    };
    group.present(rank, {1, static_cast<uint64_t>(tag.op)}, std::move(operation));
  }
  if (!ends.wait()) return failures.add("a rank was not told the end of a faulty operation");
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    if (!ends.failed(rank) && rank != silent) {
      note(world, op_name(tag.op), rank, 0, parts[rank]->check());
    }
  }
}

// Arms one rank with a fault; returns the rank if it will send nothing, else -1.
inline int arm(Random& random, Group& group) {
  const int rank = static_cast<int>(draw(random, 0, group.num_ranks() - 1));
  FaultPlan& plan = group.fault_plan(rank);
  const FaultKind kinds[] = {FaultKind::kLate, FaultKind::kSkipSend, FaultKind::kWrongTag};
  plan.microseconds = draw(random, 0, 2 * std::chrono::microseconds(kShortTimeout).count());
  plan.kind = kinds[draw(random, 0, 2)];
  return plan.kind == FaultKind::kSkipSend ? rank : -1;
}

inline void run_faults(Random& random, const World& world, Payload payload) {
  Group group(WindowLayout::make(world.shape), kShortTimeout, payload);
  const Round round = random_round(random, world);
  const int epochs = epochs_of(world, round);
  auto tag = [&](OpKind op) { return OpTag{op, static_cast<uint32_t>(round.num_tokens), 0, 0}; };
  std::vector<std::unique_ptr<DispatchPart>> dispatches;
  std::vector<std::unique_ptr<CombinePart>> combines;
  std::vector<std::unique_ptr<GradPart>> grads;
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    const int32_t* idx = round.handle_idx[rank].data();
    const int32_t* rows = round.handle_rows[rank].data();
    dispatches.push_back(std::make_unique<DispatchPart>(world, round, rank));
    combines.push_back(std::make_unique<CombinePart>(world, round, rank, idx, rows));
    grads.push_back(std::make_unique<GradPart>(world, round, rank, idx, rows));
  }
  auto mend = [&] {
    if (!group.drain(kTimeout)) failures.add("the group is not idle after a fault");
    group.reset();
  };
  run_faulty(group, world, dispatches, tag(OpKind::kDispatch), kDispatchChannel, epochs,
             arm(random, group), run_dispatch);
  mend();
  run_faulty(group, world, combines, tag(OpKind::kCombine), kCombineChannel, epochs,
             arm(random, group), run_combine);
  mend();
  run_faulty(group, world, grads, tag(OpKind::kCombineGrad), kDispatchChannel, epochs,
             arm(random, group), run_combine_grad);
  mend();
}

}  // namespace jax_ep::stress
