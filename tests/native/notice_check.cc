// Counters and their reader without Python: tickets that wrap, places that are taken over, and a
// writer and a reader at the same time. Prints the first thing that is wrong and fails.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <type_traits>

#include "transport/notice_board.h"

using namespace jax_ep;

#define EXPECT(...)                                                                  \
  do {                                                                               \
    if (!(__VA_ARGS__)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

namespace {

constexpr int kGroups = 2;
constexpr int kRanks = 3;
constexpr int kExperts = 6;

static_assert(!std::is_constructible_v<HostWords, DeviceWords>);
static_assert(!std::is_constructible_v<DeviceWords, HostWords>);
static_assert(!std::is_copy_constructible_v<MappedCounters>);

NoticeBoard make_board() {
  return NoticeBoard(kGroups, kRanks, kExperts,
                     [](int, int, int64_t words) { return make_process_counters(words); });
}

// Of this process are the ranks from 1 on of group 1.
NoticeBoard make_partial_board() {
  return NoticeBoard(kGroups, kRanks, kExperts, [](int group, int rank, int64_t words) {
    return group == 1 && rank > 0 ? make_process_counters(words) : MappedCounters::none();
  });
}

uint32_t value_of(uint32_t ticket, int place, int64_t counter) {
  return ticket * 2654435761u + static_cast<uint32_t>(place * 64 + counter);
}

void write(const NoticeBoard& board, uint32_t ticket, int place) {
  const int64_t first = board.layout().first_word(ticket);
  for (int64_t counter = 0; counter < board.layout().slot_words(); ++counter) {
    store_counter(board.counters(place / kRanks, place % kRanks), first + counter, ticket,
                  value_of(ticket, place, counter));
  }
}

NoticeReading read(const NoticeBoard& board, uint32_t ticket, int wait_ms = 0) {
  return board.read(ticket, NoticeBoard::Clock::now() + std::chrono::milliseconds(wait_ms));
}

void expect_values(const NoticeReading& reading, uint32_t ticket) {
  EXPECT(reading.state == CounterState::kReady);
  EXPECT(reading.values.size() == kGroups * kRanks * (1 + kExperts));
  for (size_t at = 0; at < reading.values.size(); ++at) {
    const auto place = static_cast<int>(at / (1 + kExperts));
    EXPECT(reading.values[at] == value_of(ticket, place, at % (1 + kExperts)));
  }
}

void check_tickets() {
  EXPECT(ticket_after(kNoTicket) == 1 && ticket_after(7) == 8);
  EXPECT(ticket_after(UINT32_MAX) == 1);
  EXPECT(is_later(3, UINT32_MAX) && !is_later(UINT32_MAX, 3) && !is_later(5, 5));
  EXPECT(counter_state(0, 5) == CounterState::kPending);
  EXPECT(counter_state(0, UINT32_MAX) == CounterState::kPending);
  EXPECT(counter_state(ticket_word(5, 9), 5) == CounterState::kReady);
  EXPECT(counter_state(ticket_word(21, 9), 5) == CounterState::kReused);
  EXPECT(counter_state(ticket_word(5, 9), 21) == CounterState::kPending);
  EXPECT(counter_state(ticket_word(2, 9), UINT32_MAX - 13) == CounterState::kReused);
}

// The first counter that is missing is named, whichever it is.
void check_missing() {
  const NoticeBoard board = make_board();
  const uint32_t ticket = 9;
  for (int place = 0; place < kGroups * kRanks; ++place) {
    for (int64_t counter = 0; counter < 1 + kExperts; ++counter) {
      const NoticeReading reading = read(board, ticket);
      EXPECT(reading.state == CounterState::kPending && reading.seen == kNoTicket);
      EXPECT(reading.group == place / kRanks && reading.rank == place % kRanks);
      EXPECT(reading.counter == counter);
      store_counter(board.counters(place / kRanks, place % kRanks),
                    board.layout().first_word(ticket) + counter, ticket,
                    value_of(ticket, place, counter));
    }
  }
  expect_values(read(board, ticket), ticket);
}

// Ranks of other processes are not waited for.
void check_partial() {
  const NoticeBoard board = make_partial_board();
  const uint32_t ticket = 9;
  for (int rank = 1; rank < kRanks; ++rank) {
    const NoticeReading reading = read(board, ticket);
    EXPECT(reading.state == CounterState::kPending && reading.group == 1 && reading.rank == rank);
    write(board, ticket, kRanks + rank);
  }
  const NoticeReading reading = read(board, ticket);
  EXPECT(reading.state == CounterState::kReady);
  EXPECT(reading.values.size() == kGroups * kRanks * (1 + kExperts));
  for (size_t at = 0; at < reading.values.size(); ++at) {
    const auto place = static_cast<int>(at / (1 + kExperts));
    EXPECT(reading.values[at] ==
           (place <= kRanks ? 0 : value_of(ticket, place, at % (1 + kExperts))));
  }
}

// A later ticket takes the place, also when the earlier one's operation comes after it.
void check_reuse(uint32_t early) {
  const uint32_t late = early + kNoticeSlots;
  const NoticeBoard board = make_board();
  for (int place = 0; place < kGroups * kRanks; ++place) {
    if (place % 2 == 0) write(board, early, place);
    write(board, late, place);
    write(board, early, place);
  }
  expect_values(read(board, late), late);
  const NoticeReading reading = read(board, early);
  EXPECT(reading.state == CounterState::kReused && reading.seen == late);
}

void check_saturation() {
  const NoticeBoard board = make_board();
  store_counter(board.counters(0, 0), board.layout().first_word(1), 1, uint64_t{1} << 40);
  EXPECT(*board.counters(0, 0).first == 0);  // ticket 1 lies in slot 1
  EXPECT(board.counters(0, 0).first[board.layout().first_word(1)] == ticket_word(1, UINT32_MAX));
}

void check_concurrency() {
  NoticeBoard board = make_board();
  constexpr int kNotices = 2000;
  std::atomic<uint32_t> wanted{0};
  std::thread writers[kGroups * kRanks];
  for (int place = 0; place < kGroups * kRanks; ++place) {
    writers[place] = std::thread([&, place] {
      for (uint32_t ticket = 1; ticket <= kNotices; ++ticket) {
        while (wanted.load(std::memory_order_acquire) < ticket) std::this_thread::yield();
        write(board, ticket, place);
      }
    });
  }
  for (int notice = 0; notice < kNotices; ++notice) {
    const uint32_t ticket = board.next_ticket();
    wanted.store(ticket, std::memory_order_release);
    expect_values(read(board, ticket, 10000), ticket);
  }
  for (std::thread& writer : writers) writer.join();
}

}  // namespace

int main() {
  check_tickets();
  check_missing();
  check_partial();
  check_reuse(5);
  check_reuse(UINT32_MAX - 7);
  check_saturation();
  check_concurrency();
}
