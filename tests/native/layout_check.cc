// Checks of ffi/layout and ffi/protocol that need their functions rather than their sizes: slot
// addresses, packing, epochs, routing. Prints what failed; exit code 0 says that nothing did.
//
// Usage: layout_check SEED
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "layout/control_block.h"
#include "layout/window_layout.h"
#include "protocol/epochs.h"
#include "protocol/routing.h"
#include "protocol/signals.h"

namespace jax_ep {
namespace {

int failures = 0;

#define EXPECT(condition)                                               \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
      ++failures;                                                       \
    }                                                                   \
  } while (0)

using Random = std::mt19937_64;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

struct Extent {
  int64_t begin;
  int64_t end;
};

// Items of one kind, in the order of their indices, tile [begin of first, end of last) of a region.
void expect_tiling(const WindowLayout& layout, Region region, int parity,
                   const std::vector<Extent>& items) {
  const int64_t begin = parity * layout.buffer_bytes + layout.offset[region];
  const int64_t end = begin + region_bytes(layout.shape, region);
  int64_t next = begin;
  for (const Extent& item : items) {
    EXPECT(item.begin == next);
    EXPECT(item.begin % 4 == 0);
    next = item.end;
  }
  EXPECT(next == end);
}

// Every region, byte for byte: what the address functions give is the region, no more and no less.
void check_addresses(Random& random) {
  const int num_ranks = static_cast<int>(draw(random, 1, 9));
  const int local = static_cast<int>(draw(random, 1, 6));
  const WindowShape shape{num_ranks,
                          static_cast<int>(draw(random, 1, 12)),
                          num_ranks * local,
                          static_cast<int>(draw(random, 1, 32)),
                          16 * draw(random, 1, 40),
                          /*staging=*/draw(random, 0, 1) == 1,
                          /*records=*/draw(random, 0, 1) == 1};
  const WindowLayout layout = WindowLayout::make(shape);
  const int64_t topk = shape.num_experts_per_tok;
  for (int parity = 0; parity < kNumBuffers; ++parity) {
    std::vector<Extent> of[kNumRegions];
    auto add = [&](Region region, int64_t begin, int64_t bytes) {
      of[region].push_back({begin, begin + bytes});
    };
    // Outgoing records lie behind those that arrive.
    std::vector<Extent> outgoing;
    for (int source = 0; source < num_ranks; ++source) {
      for (int token = 0; token < shape.tokens_per_epoch; ++token) {
        if (shape.records) {
          add(kRouteRecords, layout.route_records(parity, source, token), kRecordBytes * topk);
        }
        add(kDispatchData, layout.dispatch_message(parity, source, token), shape.message_stride());
        add(kDispatchFlags, layout.dispatch_flag(parity, source, token), 4);
        add(kCombineData, layout.combine_row(parity, source, token), shape.row_stride());
        add(kCombineScalars, layout.combine_scalars(parity, source, token), 4 * topk);
        add(kCombineFlags, layout.combine_flag(parity, source, token), 4);
        EXPECT(layout.dispatch_message(parity, source, token) % 128 == 0);
        EXPECT(layout.combine_row(parity, source, token) % 128 == 0);
        if (!shape.staging) continue;
        // Whoever stages for peer `source` does it in that peer's slots.
        const int own = static_cast<int>(draw(random, 0, num_ranks - 1));
        const int64_t message = layout.dispatch_message(parity, own, token);
        add(kDispatchSend, layout.staged(message, own, source), shape.message_stride());
        const int64_t row = layout.combine_row(parity, own, token);
        add(kCombineSend, layout.staged(row, own, source), shape.row_stride());
        if (!shape.records) continue;
        const int64_t records =
            layout.staged(layout.route_records(parity, own, token), own, source);
        outgoing.push_back({records, records + kRecordBytes * topk});
      }
      for (int expert = 0; expert < local; ++expert) {
        add(kDispatchCounts, layout.dispatch_count(parity, source, expert), 8);
        EXPECT(layout.dispatch_count(parity, source, expert) % 8 == 0);
      }
      for (int expert = 0; expert < shape.num_experts; ++expert) {
        add(kNotifyCounts, layout.notify_count(parity, source, expert), 8);
      }
      add(kDispatchTags, layout.dispatch_tag(parity, source), 8);
      add(kCombineTags, layout.combine_tag(parity, source), 8);
      EXPECT(layout.combine_tag(parity, source) % 8 == 0);
    }
    of[kRouteRecords].insert(of[kRouteRecords].end(), outgoing.begin(), outgoing.end());
    for (int r = 0; r < kNumRegions; ++r) {
      expect_tiling(layout, static_cast<Region>(r), parity, of[r]);
    }
  }
}

void check_message() {
  for (int topk = 1; topk <= kMaxExpertsPerTok; ++topk) {
    const MessageFormat message{64, topk};
    EXPECT(message.source_offset() == 64);
    EXPECT(message.entry_offset(0) == 68);
    for (int k = 1; k < topk; ++k) {
      EXPECT(message.entry_offset(k) == message.entry_offset(k - 1) + 8);
    }
    const int64_t end = message.entry_offset(topk - 1) + 8;
    EXPECT(message.bytes() >= end && message.bytes() < end + 16 && message.bytes() % 16 == 0);
  }
}

void check_control_block() {
  for (int num_ranks : {1, 2, 3, 8, 64}) {
    const ControlLayout layout{num_ranks};
    std::vector<int64_t> lines = {layout.poison()};
    for (Channel channel : {kDispatchChannel, kCombineChannel}) {
      lines.push_back(layout.epoch(channel));
      lines.push_back(layout.doorbell(channel));
      for (int peer = 0; peer < num_ranks; ++peer) lines.push_back(layout.credit(channel, peer));
    }
    std::vector<bool> taken(layout.total_bytes() / ControlLayout::kLineBytes, false);
    EXPECT(lines.size() == taken.size());
    for (int64_t line : lines) {
      EXPECT(line % ControlLayout::kLineBytes == 0 && line < layout.total_bytes());
      EXPECT(!taken[line / ControlLayout::kLineBytes]);
      taken[line / ControlLayout::kLineBytes] = true;
    }
  }
}

void check_routes(Random& random) {
  for (int i = 0; i < 2000; ++i) {
    const bool extreme = i < 4;
    const int expert = static_cast<int>(extreme ? (i & 1) * (kMaxLocalExperts - 1)
                                                : draw(random, 0, kMaxLocalExperts - 1));
    const int index = static_cast<int>(extreme ? (i >> 1) * (kMaxTokensPerRank - 1)
                                               : draw(random, 0, kMaxTokensPerRank - 1));
    const uint32_t route = pack_route(expert, index);
    EXPECT(route != kNoRoute);
    EXPECT(route_expert(route) == expert && route_index(route) == index);
  }
}

void check_epochs(Random& random) {
  // A window starts as zeros: epochs 1 and 2 are free to write, and no flag or word is valid.
  EXPECT(may_write(1, 0) && may_write(2, 0) && !may_write(3, 0));
  for (int i = 0; i < 2000; ++i) {
    // Around the places where the 32-bit flag and the 32 bits of a word's epoch wrap as well.
    const uint64_t base = std::vector<uint64_t>{3, 1ull << 31, 1ull << 32, 5ull << 32}[i % 4];
    const uint64_t epoch = base + static_cast<uint64_t>(draw(random, -2, 1000));
    EXPECT(may_write(epoch, epoch - 2) && !may_write(epoch, epoch - 3));
    EXPECT(parity_of(epoch) != parity_of(epoch + 1) && parity_of(epoch) == parity_of(epoch + 2));
    EXPECT(read_arrival(arrival_flag(epoch, true), epoch) == Arrival::kArrived);
    EXPECT(read_arrival(arrival_flag(epoch, false), epoch) == Arrival::kAbsent);
    const auto value = static_cast<uint32_t>(random());
    EXPECT(word_is_of(epoch_word(epoch, value), epoch));
    EXPECT(word_value(epoch_word(epoch, value)) == value);
    const uint64_t other = epoch + static_cast<uint64_t>(draw(random, 1, 1ll << 30));
    EXPECT(read_arrival(arrival_flag(epoch, true), other) == Arrival::kPending);
    EXPECT(read_arrival(arrival_flag(other, true), epoch) == Arrival::kPending);
    EXPECT(read_arrival(arrival_flag(epoch, false), other) == Arrival::kPending);
    EXPECT(!word_is_of(epoch_word(epoch, value), other));
  }
  for (uint64_t epoch = 1; epoch < 2000; ++epoch) {
    EXPECT(read_arrival(0, epoch) == Arrival::kPending && !word_is_of(0, epoch));
  }
}

void check_chunks(Random& random) {
  const int tokens = static_cast<int>(draw(random, 0, 70));
  const int carried = static_cast<int>(draw(random, 1, 20));
  const int chunks = num_epochs(tokens, carried);
  EXPECT(chunks >= 1);
  int next = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const TokenRange range = chunk_tokens(tokens, carried, chunk);
    EXPECT(range.begin == next && range.size() <= carried);
    EXPECT(range.size() == carried || chunk == chunks - 1);
    EXPECT(range.size() > 0 || tokens == 0);
    next = range.end;
  }
  EXPECT(next == tokens);
}

void check_tags(Random& random) {
  const OpTag tag{OpKind::kDispatch, static_cast<uint32_t>(random()),
                  static_cast<uint32_t>(random()), random()};
  const uint32_t value = tag_value(tag);
  OpTag other = tag;
  other.op = OpKind::kCombineGrad;
  EXPECT(tag_value(other) != value);
  other = tag;
  other.num_tokens ^= static_cast<uint32_t>(draw(random, 1, UINT32_MAX));
  EXPECT(tag_value(other) != value);
  other = tag;
  other.variant ^= static_cast<uint32_t>(draw(random, 1, UINT32_MAX));
  EXPECT(tag_value(other) != value);
  other = tag;
  other.site ^= static_cast<uint64_t>(draw(random, 1, UINT32_MAX));
  EXPECT(tag_value(other) != value);
}

// place_expert and ExpertSegment against rows put down one by one; some counts are corrupted.
void check_placement(Random& random) {
  const int num_ranks = static_cast<int>(draw(random, 1, 6));
  const int most = static_cast<int>(draw(random, 0, 9));
  const int64_t alignment = draw(random, 1, 5);
  const int64_t capacity = draw(random, 1, 60);
  int64_t begin = draw(random, 0, 40);
  std::vector<int32_t> counts(num_ranks);
  std::vector<int32_t> sound(num_ranks);
  for (int source = 0; source < num_ranks; ++source) {
    sound[source] = counts[source] = static_cast<int32_t>(draw(random, 0, most));
    if (draw(random, 0, 9) > 0) continue;
    const bool huge = draw(random, 0, 1) == 1;
    counts[source] = huge ? INT32_MAX : INT32_MIN;
    sound[source] = huge ? most : 0;
  }
  std::vector<int32_t> bases = counts;
  const ExpertSegment segment = place_expert(bases.data(), num_ranks, most, begin, alignment);
  int64_t row = begin;
  int valid = 0;
  for (int source = 0; source < num_ranks; ++source) {
    EXPECT(bases[source] == row);
    for (int i = 0; i < sound[source]; ++i) valid += row++ < capacity;
  }
  EXPECT(segment.begin == begin && segment.true_rows == row - begin);
  EXPECT(segment.valid_size(capacity) == valid);
  int group = 0;
  int64_t end = begin;
  for (; end < row || (end - begin) % alignment != 0; ++end) group += end < capacity;
  EXPECT(segment.padded_rows == end - begin && segment.group_size(capacity) == group);
}

// Rows past 2^31 are past every capacity: a base must not wrap round to a row that exists.
void check_far_placement(Random& random) {
  const int64_t begin = draw(random, (int64_t{1} << 31) - 5, int64_t{1} << 34);
  int32_t counts[] = {3, 2};
  place_expert(counts, 2, 9, begin, 1);
  for (int32_t base : counts) EXPECT(int64_t{base} + 2 >= std::min<int64_t>(begin, INT32_MAX));
}

void check_sanitising(Random& random) {
  const int num_experts = 5;
  const int topk = 4;
  int32_t experts[topk];
  for (int32_t& expert : experts) expert = static_cast<int32_t>(draw(random, -3, num_experts + 1));
  if (draw(random, 0, 9) == 0) experts[1] = INT32_MIN;
  if (draw(random, 0, 9) == 0) experts[2] = INT32_MAX;
  for (int k = 0; k < topk; ++k) {
    RouteFault fault;
    const int got = sanitised_expert(experts, k, num_experts, &fault);
    bool repeated = false;
    for (int j = 0; j < k; ++j) repeated |= experts[j] == experts[k];
    const bool named = experts[k] >= 0 && experts[k] < num_experts;
    EXPECT(got == (named && !repeated ? experts[k] : -1));
    const RouteFault expected = experts[k] == -1 ? RouteFault::kNone
                                : !named         ? RouteFault::kOutOfRange
                                : repeated       ? RouteFault::kDuplicate
                                                 : RouteFault::kNone;
    EXPECT(fault == expected);
  }
}

void check_all(uint64_t seed) {
  Random random(seed);
  check_message();
  check_control_block();
  check_routes(random);
  check_epochs(random);
  for (int i = 0; i < 300; ++i) {
    check_addresses(random);
    check_chunks(random);
    check_tags(random);
    check_placement(random);
    check_far_placement(random);
    check_sanitising(random);
  }
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: layout_check SEED\n");
    return 2;
  }
  jax_ep::check_all(std::strtoull(argv[1], nullptr, 10));
  return jax_ep::failures == 0 ? 0 : 1;
}
