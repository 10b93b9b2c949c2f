// Direct driving: a thread for each (rank, channel) calls run_dispatch, run_combine and
// run_combine_grad itself. Ranks share windows and nothing else, no mutex, no queue: only the
// protocol orders them, which is what a race detector must see.
#pragma once

#include <cstring>
#include <thread>
#include <vector>

#include "protocol/error_text.h"
#include "stress_ops.h"
#include "stress_report.h"
#include "transport/host_signals.h"
#include "transport/host_window.h"

namespace jax_ep::stress {

class DirectDriver {
 public:
  DirectDriver(const World& world, const std::vector<Round>& rounds, Payload payload)
      : world_(world),
        rounds_(rounds),
        payload_(payload),
        windows_(WindowLayout::make(world.shape)) {
    for (const Round& round : rounds) parts_.push_back(make_parts(round));
    // Whatever was never sent must never show: fill everything but the signals with poison.
    const WindowLayout layout = WindowLayout::make(world.shape);
    const Window window = windows_.view(0);
    for (int rank = 0; rank < world.num_ranks() && world.num_ranks() > 1; ++rank) {
      for (int parity = 0; parity < kNumBuffers; ++parity) {
        for (Region region : {kDispatchData, kCombineData, kCombineScalars}) {
          std::memset(window.data(rank, layout.item(region, parity, 0)), kPoison,
                      region_bytes(layout.shape, region));
        }
      }
    }
  }

  void run(Random& random, bool jitter) {
    if (jitter) {
      plan_.kind = FaultKind::kJitter;
      plan_.microseconds = kJitterMicroseconds;
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_.num_ranks(); ++rank) {
      const uint64_t seed = random();
      threads.emplace_back([this, rank, seed] { run_dispatch_channel(rank, Random(seed)); });
      threads.emplace_back([this, rank, seed] { run_combine_channel(rank, Random(seed + 1)); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  RankContext make_context(int rank) {
    RankContext context{};
    context.window = windows_.view(rank);
    context.timeout = kTimeout;
    context.faults = &plan_;
    context.report = [this](const ErrorRecord& record) {
      failures.add(describe(record, std::chrono::duration<double>(kTimeout).count()));
      const Window window = windows_.view(record.rank);
      for (int peer = 0; peer < world_.num_ranks(); ++peer) {
        atomic32(window.control(peer, window.control_layout.poison())).store(1);
      }
    };
    context.report_data_fault = [](const DataFault&) {};
    return context;
  }

  // All ranks' parts of a round: what one lends, the others may read once a flag says so.
  struct Parts {
    std::vector<DispatchPart> dispatch;
    std::vector<CombinePart> combine;
    std::vector<GradPart> grad;
  };

  Parts make_parts(const Round& round) const {
    Parts parts;
    for (int rank = 0; rank < world_.num_ranks(); ++rank) {
      const int32_t* idx = round.handle_idx[rank].data();
      const int32_t* rows = round.handle_rows[rank].data();
      parts.dispatch.emplace_back(world_, round, rank);
      parts.combine.emplace_back(world_, round, rank, idx, rows);
      parts.grad.emplace_back(world_, round, rank, idx, rows);
    }
    return parts;
  }

  // One rank's part of one operation. False when it gave up.
  template <class Part, class Run>
  bool carry_out(RankContext& context, std::vector<Part>& parts, OpKind op, size_t round, Run run,
                 uint64_t* epoch) {
    std::vector<OperandView> operands;
    for (Part& part : parts) operands.push_back(part.args().view());
    context.operands = payload_ == Payload::kReference ? operands.data() : nullptr;
    const int rank = context.window.rank;
    parts[rank].fill_operands();
    const auto tokens = static_cast<uint32_t>(rounds_[round].num_tokens);
    if (!run(context, parts[rank].args(), {op, tokens, 0, round}, *epoch)) return false;
    *epoch += epochs_of(world_, rounds_[round]);
    note(world_, op_name(op), rank, static_cast<int>(round), parts[rank].check());
    return true;
  }

  // Some rounds come in halves, the same ones on all ranks.
  bool in_halves(size_t round) const {
    return round % 3 == 1 && epochs_of(world_, rounds_[round]) == 1;
  }

  OpTag tag_of(OpKind op, size_t round) const {
    return {op, static_cast<uint32_t>(rounds_[round].num_tokens), 0, round};
  }

  // A dispatch in halves, and a whole operation between them that takes the other buffer.
  bool dispatch_around_grad(RankContext& context, size_t round, uint64_t* epoch) {
    const int rank = context.window.rank;
    DispatchPart& part = parts_[round].dispatch[rank];
    const OpTag tag = tag_of(OpKind::kDispatch, round);
    const uint64_t open = (*epoch)++;
    context.operands = nullptr;
    context.read_through = open - 1;
    part.fill_operands();
    if (!run_dispatch_start(context, part.args(), tag, open)) return false;
    if (!carry_out(context, parts_[round].grad, OpKind::kCombineGrad, round, run_combine_grad,
                   epoch)) {
      return false;
    }
    context.operands = nullptr;
    context.read_through = *epoch - 1;
    const bool ok = run_dispatch_done(context, part.args(), tag, open);
    context.read_through = UINT64_MAX;
    if (ok) note(world_, "dispatch", rank, static_cast<int>(round), part.check());
    return ok;
  }

  // Two combines on their way at once, the younger one received first.
  bool combine_crosswise(RankContext& context, size_t round, uint64_t* epoch) {
    const int rank = context.window.rank;
    const uint64_t first = *epoch;
    *epoch += 2;
    context.operands = nullptr;
    for (size_t i : {round, round + 1}) {
      CombinePart& part = parts_[i].combine[rank];
      part.fill_operands();
      context.read_through = first - 1;
      const OpTag tag = tag_of(OpKind::kCombine, i);
      if (!run_combine_start(context, part.args(), tag, first + (i - round))) return false;
    }
    for (size_t i : {round + 1, round}) {
      CombinePart& part = parts_[i].combine[rank];
      context.read_through = i == round ? first + 1 : first - 1;
      const OpTag tag = tag_of(OpKind::kCombine, i);
      if (!run_combine_done(context, part.args(), tag, first + (i - round))) return false;
      note(world_, "combine", rank, static_cast<int>(i), part.check());
    }
    context.read_through = UINT64_MAX;
    return true;
  }

  void run_dispatch_channel(int rank, Random random) {
    RankContext context = make_context(rank);
    uint64_t epoch = kFirstEpoch;
    for (size_t i = 0; i < rounds_.size(); ++i) {
      Parts& parts = parts_[i];
      pause(random);
      if (in_halves(i)) {
        if (!dispatch_around_grad(context, i, &epoch)) return;
        continue;
      }
      if (!carry_out(context, parts.dispatch, OpKind::kDispatch, i, run_dispatch, &epoch)) return;
      if (!carry_out(context, parts.grad, OpKind::kCombineGrad, i, run_combine_grad, &epoch))
        return;
    }
  }

  void run_combine_channel(int rank, Random random) {
    RankContext context = make_context(rank);
    uint64_t epoch = kFirstEpoch;
    for (size_t i = 0; i < rounds_.size(); ++i) {
      pause(random);
      if (in_halves(i) && i + 1 < rounds_.size() && epochs_of(world_, rounds_[i + 1]) == 1) {
        if (!combine_crosswise(context, i++, &epoch)) return;
        continue;
      }
      if (!carry_out(context, parts_[i].combine, OpKind::kCombine, i, run_combine, &epoch)) return;
    }
  }

  const World& world_;
  const std::vector<Round>& rounds_;
  const Payload payload_;
  std::vector<Parts> parts_;
  HostWindows windows_;
  FaultPlan plan_;
};

}  // namespace jax_ep::stress
