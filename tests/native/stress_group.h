// Driving through a Group: a thread for each rank presents operations in an order of its own,
// several rounds at a time, as XLA's threads do.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "stress_ops.h"
#include "stress_report.h"

namespace jax_ep::stress {

// In which order a rank presents what is ready.
enum class Order {
  kAny,
  kLoop,     // as a program's loop does: one instruction comes again and again, alike on all ranks
  kChannel,  // the operations of a channel alike on all ranks, as several processes must
};

// One rank's thread: presents whichever of its operations are ready, in random order.
class Presenter {
 public:
  Presenter(Group& group, const World& world, const std::vector<Round>& rounds, int rank,
            Order order, Random random)
      : group_(group),
        world_(world),
        rounds_(rounds),
        rank_(rank),
        order_(order),
        random_(random),
        parts_(rounds.size()) {
    for (size_t round = 0; round <= rounds.size(); ++round) {
      auto& dispatches = in_channel_[kDispatchChannel];
      if (round < rounds.size()) dispatches.push_back({OpKind::kDispatch, round});
      if (round > 0) dispatches.push_back({OpKind::kCombineGrad, round - 1});
      if (round < rounds.size()) in_channel_[kCombineChannel].push_back({OpKind::kCombine, round});
    }
  }

  void run() {
    constexpr size_t kInFlight = 5;
    size_t opened = 0;
    size_t finished = 0;
    while (finished < rounds_.size() && !failures.any()) {
      while (opened < rounds_.size() && opened < finished + kInFlight) {
        ready_.push_back({OpKind::kDispatch, opened++});
      }
      const std::vector<size_t> able = choices();
      if (!able.empty()) {
        const auto last = static_cast<int64_t>(able.size()) - 1;
        present(take(able[static_cast<size_t>(draw(random_, 0, last))]));
        if (chance(random_, 60)) continue;  // else look whether something has come back
      }
      finished += take_finished(/*wait=*/able.empty());
    }
    // After a failure ranks stop at different places: what one presented, another never will.
    if (failures.any()) group_.close("another rank found a failure");
    while (outstanding_ > 0) take_finished(/*wait=*/true);
  }

 private:
  struct Key {
    OpKind op;
    size_t round;
  };
  struct Parts {
    std::unique_ptr<DispatchPart> dispatch;
    std::unique_ptr<CombinePart> combine;
    std::unique_ptr<GradPart> grad;
    int left = 3;
  };

  static Channel channel_of(OpKind op) {
    return op == OpKind::kCombine ? kCombineChannel : kDispatchChannel;
  }

  bool is_due(const Key& key) const {
    if (order_ == Order::kLoop) return key.round == next_[static_cast<int>(key.op)];
    if (order_ == Order::kAny) return true;
    const Key& due = in_channel_[channel_of(key.op)].front();
    return due.op == key.op && due.round == key.round;
  }

  // Operations that may be presented now.
  std::vector<size_t> choices() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (is_due(ready_[i])) found.push_back(i);
    }
    return found;
  }
  Key take(size_t at) {
    const Key key = ready_[at];
    ++next_[static_cast<int>(key.op)];
    if (order_ == Order::kChannel) in_channel_[channel_of(key.op)].pop_front();
    ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(at));
    return key;
  }

  void present(const Key& key) {
    const Round& round = rounds_[key.round];
    Parts& parts = parts_[key.round];
    Operation operation;
    operation.tag = {key.op, static_cast<uint32_t>(round.num_tokens), 0, 0};
    operation.channel = channel_of(key.op);
    operation.num_epochs = epochs_of(world_, round);
    if (key.op == OpKind::kDispatch) {
      parts.dispatch = std::make_unique<DispatchPart>(world_, round, rank_);
      lend(*parts.dispatch, &operation);
      carry_out_by(parts.dispatch->args(), key,
                   {run_dispatch, run_dispatch_start, run_dispatch_receive}, &operation);
    } else if (key.op == OpKind::kCombine) {
      parts.combine = std::make_unique<CombinePart>(world_, round, rank_, handle_idx(key.round),
                                                    handle_rows(key.round));
      lend(*parts.combine, &operation);
      carry_out_by(parts.combine->args(), key, {run_combine, run_combine_start, run_combine_done},
                   &operation);
    } else {
      parts.grad = std::make_unique<GradPart>(world_, round, rank_, handle_idx(key.round),
                                              handle_rows(key.round));
      lend(*parts.grad, &operation);
      operation.run = [args = parts.grad->args()](auto& context, auto& tag, uint64_t epoch) {
        return run_combine_grad(context, args, tag, epoch);
      };
    }
    operation.done = [this, key](const std::string* error) { on_done(key, error); };
    const auto op = static_cast<uint64_t>(key.op);
    const auto run_id = static_cast<int64_t>(order_ == Order::kLoop ? 7 : key.round);
    ++outstanding_;
    group_.present(rank_, {run_id, op}, std::move(operation));
  }

  template <class Args>
  using Run = bool (*)(RankContext&, const Args&, const OpTag&, uint64_t);
  template <class Args>
  struct Runs {
    Run<Args> whole, send, rest;
  };
  // In one task or, of one epoch, in two, which the ranks choose each for itself.
  template <class Args>
  void carry_out_by(const Args& args, const Key& key, const Runs<Args>& runs,
                    Operation* operation) const {
    const auto bind = [&args](Run<Args> run) -> Operation::Part {
      return [args, run](RankContext& context, const OpTag& tag, uint64_t epoch) {
        return run(context, args, tag, epoch);
      };
    };
    const bool in_two = operation->num_epochs == 1 && (key.round + rank_) % 3 != 0;
    if (in_two) operation->send = bind(runs.send);
    operation->run = bind(in_two ? runs.rest : runs.whole);
  }

  template <class Part>
  static void lend(Part& part, Operation* operation) {
    part.fill_operands();
    operation->operands = part.args().view();
  }
  void take_back(const Key& key) {
    Parts& parts = parts_[key.round];
    if (key.op == OpKind::kDispatch) parts.dispatch->take_back_operands();
    if (key.op == OpKind::kCombine) parts.combine->take_back_operands();
    if (key.op == OpKind::kCombineGrad) parts.grad->take_back_operands();
  }

  // Dispatch's own results are the handle, unless the round asks for a bad one.
  const int32_t* handle_idx(size_t i) const {
    const Round& round = rounds_[i];
    return round.hostile ? round.handle_idx[rank_].data() : parts_[i].dispatch->clean_idx.data();
  }
  const int32_t* handle_rows(size_t i) const {
    const Round& round = rounds_[i];
    return round.hostile ? round.handle_rows[rank_].data() : parts_[i].dispatch->recv_rows.data();
  }

  void on_done(const Key& key, const std::string* error) {
    if (error != nullptr) failures.add(*error);
    take_back(key);
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.push_back(key);
    changed_.notify_one();
  }

  // Checks what has come back; returns the number of rounds that ended with it.
  size_t take_finished(bool wait) {
    std::deque<Key> finished;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (wait && finished_.empty()) changed_.wait(lock);
      finished.swap(finished_);
    }
    size_t ended = 0;
    for (const Key& key : finished) {
      Parts& parts = parts_[key.round];
      const int round = static_cast<int>(key.round);
      --outstanding_;
      if (failures.any()) continue;  // an operation that failed has written nothing to look at
      if (key.op == OpKind::kDispatch) {
        note(world_, "dispatch", rank_, round, parts.dispatch->check());
        ready_.push_back({OpKind::kCombine, key.round});
        ready_.push_back({OpKind::kCombineGrad, key.round});
      } else if (key.op == OpKind::kCombine) {
        note(world_, "combine", rank_, round, parts.combine->check());
      } else {
        note(world_, "combine_grad", rank_, round, parts.grad->check());
      }
      if (--parts.left > 0) continue;
      parts = {};
      ++ended;
    }
    return ended;
  }

  Group& group_;
  const World& world_;
  const std::vector<Round>& rounds_;
  const int rank_;
  const Order order_;
  Random random_;
  std::vector<Parts> parts_;
  std::vector<Key> ready_;
  size_t next_[4] = {};
  std::deque<Key> in_channel_[kNumChannels];  // what is yet to come, for Order::kChannel
  int outstanding_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Key> finished_;
};

// Returns the faults of data that ranks of this process met.
inline int64_t run_ranks(Group& group, const World& world, const std::vector<Round>& rounds,
                         const std::vector<int>& ranks, Order order, Random& random, bool jitter) {
  for (int rank = 0; rank < world.num_ranks() && jitter; ++rank) {
    group.fault_plan(rank).microseconds = kJitterMicroseconds;
    group.fault_plan(rank).kind = FaultKind::kJitter;
  }
  std::deque<Presenter> presenters;
  std::vector<std::thread> threads;
  for (const int rank : ranks) {
    presenters.emplace_back(group, world, rounds, rank, order, Random(random()));
  }
  for (Presenter& presenter : presenters) {
    threads.emplace_back([&presenter] { presenter.run(); });
  }
  for (std::thread& thread : threads) thread.join();
  if (failures.any()) return 0;
  if (!group.drain(kTimeout)) failures.add("the group is not idle after its last operation");
  uint64_t expected[kNumChannels] = {};
  for (const Round& round : rounds) {
    expected[kDispatchChannel] += 2 * epochs_of(world, round);
    expected[kCombineChannel] += epochs_of(world, round);
  }
  for (Channel channel : {kDispatchChannel, kCombineChannel}) {
    if (group.epochs(channel) != expected[channel]) failures.add("epochs were lost or added");
  }
  if (!group.error_records().empty()) failures.add("errors were recorded");
  const auto faults = group.take_data_faults();
  return faults ? faults->second.count : 0;
}

inline int64_t faults_of(const std::vector<Round>& rounds) {
  int64_t count = 0;
  for (const Round& round : rounds) count += round.num_faults;
  return count;
}

inline void run_group(Group& group, const World& world, const std::vector<Round>& rounds,
                      Random& random, bool jitter) {
  std::vector<int> ranks(static_cast<size_t>(world.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const Order order = chance(random, 40) ? Order::kLoop : Order::kAny;
  const int64_t faults = run_ranks(group, world, rounds, ranks, order, random, jitter);
  if (!failures.any() && faults != faults_of(rounds)) failures.add("data faults miscounted");
}

}  // namespace jax_ep::stress
