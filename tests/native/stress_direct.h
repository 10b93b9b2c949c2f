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
  DirectDriver(const World& world, const std::vector<Round>& rounds)
      : world_(world), rounds_(rounds), windows_(WindowLayout::make(world.shape)) {
    // Whatever was never sent must never show: fill everything but the signals with poison.
    const WindowLayout layout = WindowLayout::make(world.shape);
    const Window window = windows_.view(0);
    for (int rank = 0; rank < world.num_ranks() && world.num_ranks() > 1; ++rank) {
      for (int parity = 0; parity < kNumBuffers; ++parity) {
        for (Region region : {kDispatchData, kCombineData, kCombineScalars}) {
          std::memset(window.data(rank, layout.item(region, parity, 0, 0)), kPoison,
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

  void run_dispatch_channel(int rank, Random random) {
    RankContext context = make_context(rank);
    uint64_t epoch = kFirstEpoch;
    for (size_t i = 0; i < rounds_.size(); ++i) {
      const Round& round = rounds_[i];
      const auto tokens = static_cast<uint32_t>(round.num_tokens);
      pause(random);
      DispatchPart dispatch(world_, round, rank);
      if (!run_dispatch(context, dispatch.args(), {OpKind::kDispatch, tokens, 0, i}, epoch)) return;
      epoch += epochs_of(world_, round);
      note(world_, "dispatch", rank, static_cast<int>(i), dispatch.check());
      GradPart grad(world_, round, rank, round.handle_idx[rank].data(),
                    round.handle_rows[rank].data());
      if (!run_combine_grad(context, grad.args(), {OpKind::kCombineGrad, tokens, 0, i}, epoch)) {
        return;
      }
      epoch += epochs_of(world_, round);
      note(world_, "combine_grad", rank, static_cast<int>(i), grad.check());
    }
  }

  void run_combine_channel(int rank, Random random) {
    RankContext context = make_context(rank);
    uint64_t epoch = kFirstEpoch;
    for (size_t i = 0; i < rounds_.size(); ++i) {
      const Round& round = rounds_[i];
      pause(random);
      CombinePart combine(world_, round, rank, round.handle_idx[rank].data(),
                          round.handle_rows[rank].data());
      const OpTag tag{OpKind::kCombine, static_cast<uint32_t>(round.num_tokens), 0, i};
      if (!run_combine(context, combine.args(), tag, epoch)) return;
      epoch += epochs_of(world_, round);
      note(world_, "combine", rank, static_cast<int>(i), combine.check());
    }
  }

  const World& world_;
  const std::vector<Round>& rounds_;
  HostWindows windows_;
  FaultPlan plan_;
};

}  // namespace jax_ep::stress
