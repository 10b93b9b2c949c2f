// Dispatch of one rank whose peers' memory holds garbage: counts, routes and tokens of any value,
// under flags that say "arrived". Whatever comes, no address outside the arrays: the results lie
// between guard bytes, and an address checker sees the rest.
#pragma once

#include <atomic>
#include <vector>

#include "cpu/dispatch.h"
#include "stress_report.h"
#include "stress_world.h"
#include "transport/host_signals.h"
#include "transport/host_window.h"

namespace jax_ep::stress {

// An array with guards on both sides.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t size) : size_(size), memory_(size + 2 * kGuard, kMark) {}
  T* data() { return memory_.data() + kGuard; }
  int64_t size() const { return size_; }
  bool intact() const {
    for (int64_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != kMark || memory_[kGuard + size_ + i] != kMark) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr T kMark = static_cast<T>(77);
  int64_t size_;
  std::vector<T> memory_;
};

// Small numbers hit the boundaries of valid ones, the others are anything.
inline uint32_t garbage_word(Random& random) {
  return static_cast<uint32_t>(chance(random, 60) ? draw(random, 0, 12) : random());
}

// Everything that `source` would have sent to rank 0 in `epoch`, except that it makes no sense.
inline void send_garbage(Random& random, const Window& window, const OpTag& tag, int source,
                         uint64_t epoch) {
  const WindowLayout& layout = window.layout;
  const int parity = parity_of(epoch);
  for (int expert = 0; expert < layout.shape.experts_per_rank(); ++expert) {
    atomic64(window.data(0, layout.dispatch_count(parity, source, expert)))
        .store(epoch_word(epoch, garbage_word(random)));
  }
  for (int token = 0; token < layout.shape.tokens_per_epoch; ++token) {
    char* message = window.data(0, layout.dispatch_message(parity, source, token));
    for (int64_t i = 0; i < layout.shape.message().bytes(); i += 4) {
      const uint32_t low = garbage_word(random);
      const uint32_t word = chance(random, 70) ? pack_route(garbage_word(random) & 7, low) : low;
      std::memcpy(message + i, &word, 4);
    }
    atomic32(window.data(0, layout.dispatch_flag(parity, source, token)))
        .store(arrival_flag(epoch, chance(random, 90)));
  }
  atomic64(window.data(0, layout.dispatch_tag(parity, source)))
      .store(epoch_word(epoch, tag_value(tag)));
}

inline void run_corrupt(Random& random, const World& world) {
  if (world.num_ranks() == 1) return;
  Round round = random_round(random, world);
  // Epochs 1 and 2 need no credit from the peers, which are not there to give one.
  while (epochs_of(world, round) > 2) round = random_round(random, world);
  const OpTag tag{OpKind::kDispatch, static_cast<uint32_t>(round.num_tokens), 0, 0};
  HostWindows windows(WindowLayout::make(world.shape));
  FaultPlan plan;
  RankContext context{};
  context.window = windows.view(0);
  context.timeout = kTimeout;
  context.faults = &plan;
  context.report = [](const ErrorRecord&) { failures.add("garbage made a rank give up"); };
  context.report_data_fault = [](const DataFault&) {};
  std::vector<OperandView> operands;
  for (const std::vector<char>& x : round.x) {
    operands.push_back({x.data(), round.num_tokens, round.num_tokens, nullptr, nullptr, nullptr});
  }
  context.operands = chance(random, 50) ? operands.data() : nullptr;
  for (int source = 1; source < world.num_ranks(); ++source) {
    for (uint64_t epoch : {1, 2}) send_garbage(random, context.window, tag, source, epoch);
  }

  const int64_t entries = int64_t{round.num_tokens} * world.topk();
  const int64_t num_slots = int64_t{world.num_ranks()} * round.num_tokens;
  Guarded<char> tokens((round.expanded ? round.capacity : num_slots) * world.shape.row_bytes);
  Guarded<float> weights(round.capacity);
  Guarded<int32_t> groups(world.shape.experts_per_rank()), valids(groups.size()), dropped(1);
  Guarded<int32_t> idx(entries), rows(world.num_ranks() * entries);
  Guarded<int32_t> row_map(round.capacity);
  const DispatchArgs args{
      round.x[0].data(), round.topk_idx[0].data(), round.topk_weights[0].data(),
      tokens.data(),     weights.data(),           groups.data(),
      valids.data(),     dropped.data(),           idx.data(),
      rows.data(),       round.num_tokens,         round.capacity,
      round.alignment,   round.zero_tail,          round.expanded ? nullptr : row_map.data()};
  const bool ended = run_dispatch(context, args, tag, kFirstEpoch);
  bool sound = ended && tokens.intact() && weights.intact() && groups.intact() && valids.intact() &&
               dropped.intact() && idx.intact() && rows.intact() && row_map.intact();
  int64_t total = 0;
  for (int64_t i = 0; i < groups.size(); ++i) {
    sound = sound && valids.data()[i] >= 0 && groups.data()[i] >= valids.data()[i];
    total += groups.data()[i];
  }
  sound = sound && total <= round.capacity && *dropped.data() >= 0;
  for (int64_t i = 0; i < rows.size(); ++i) {
    sound = sound && rows.data()[i] >= -1 && rows.data()[i] < round.capacity;
  }
  for (int64_t i = 0; i < row_map.size() && !round.expanded; ++i) {
    sound = sound && row_map.data()[i] >= 0 && row_map.data()[i] <= num_slots;
  }
  if (!sound) failures.add("garbage from peers left the arrays, in " + world.describe());
}

}  // namespace jax_ep::stress
