#include "transport/notice_board.h"

#include <algorithm>
#include <thread>

#include "transport/host_signals.h"

namespace jax_ep {

namespace {

constexpr std::chrono::microseconds kShortestSleep{10};
constexpr std::chrono::microseconds kLongestSleep{500};

}  // namespace

NoticeBoard::NoticeBoard(int num_groups, int num_ranks, int num_experts, const Allocate& allocate)
    : num_ranks_(num_ranks), layout_{num_experts} {
  for (int group = 0; group < num_groups; ++group) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      counters_.push_back(allocate(group, rank, layout_.num_words()));
    }
  }
}

uint32_t NoticeBoard::next_ticket() {
  uint32_t last = last_ticket_.load(std::memory_order_relaxed);
  while (!last_ticket_.compare_exchange_weak(last, ticket_after(last))) {
  }
  return ticket_after(last);
}

NoticeReading NoticeBoard::read(uint32_t ticket, Clock::time_point deadline,
                                Clock::duration spin) const {
  NoticeReading reading;
  reading.values.reserve(counters_.size() * layout_.slot_words());
  const Clock::time_point rest = std::min(deadline, Clock::now() + spin);
  while (!look(ticket, &reading) && reading.read_at < rest) cpu_pause();
  for (auto sleep = kShortestSleep;
       reading.state == CounterState::kPending && reading.read_at < deadline;
       sleep = std::min(2 * sleep, kLongestSleep)) {
    std::this_thread::sleep_for(sleep);
    look(ticket, &reading);
  }
  return reading;
}

bool NoticeBoard::look(uint32_t ticket, NoticeReading* reading) const {
  take_ready(ticket, reading);
  reading->read_at = Clock::now();
  return reading->state != CounterState::kPending;
}

void NoticeBoard::take_ready(uint32_t ticket, NoticeReading* reading) const {
  const auto slot_words = static_cast<size_t>(layout_.slot_words());
  const size_t num_values = counters_.size() * slot_words;
  for (size_t next = reading->values.size(); next < num_values; next = reading->values.size()) {
    const auto place = static_cast<int>(next / slot_words);
    const auto counter = static_cast<int64_t>(next % slot_words);
    if (!counters_[place].exist()) {
      reading->state = CounterState::kReady;
      reading->values.resize(next + slot_words);
      continue;
    }
    uint64_t* address = counters_[place].host().first + layout_.first_word(ticket) + counter;
    const uint64_t word =
        atomic64(reinterpret_cast<char*>(address)).load(std::memory_order_acquire);
    reading->state = counter_state(word, ticket);
    if (reading->state != CounterState::kReady) {
      reading->group = place / num_ranks_;
      reading->rank = place % num_ranks_;
      reading->counter = counter;
      reading->seen = ticket_of(word);
      return;
    }
    reading->values.push_back(static_cast<uint32_t>(word));
  }
}

}  // namespace jax_ep
