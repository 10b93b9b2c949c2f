// What a group does when a rank gives up: its records, the poison, and what is still pending.
#include <algorithm>

#include "cpu/group.h"
#include "protocol/error_text.h"
#include "transport/host_signals.h"

namespace jax_ep {

namespace {

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::string Group::rank_error(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  hear_of_error();
  for (const auto& [record, text] : records_) {
    if (record.rank == rank) return text;
  }
  return records_.empty() ? "EpUsageError: the buffer was reset while operations were running."
                          : records_.front().second;
}

void Group::file(const ErrorRecord& record) {
  const double timeout_s = seconds(timeout_);
  std::string text = records_.empty()
                         ? describe(record, timeout_s)
                         : describe_follower(record, records_.front().first, timeout_s);
  if (membership_.is_shared()) {
    const ErrorRecord& first = records_.empty() ? record : records_.front().first;
    text += " Here " + membership_.place_of(first.rank) + ", and " +
            membership_.place_of(first.peer) + ".";
  }
  records_.emplace_back(record, std::move(text));
}

// Kept even where none of our ranks was waiting: later operations must be refused here too.
void Group::hear_of_error() {
  ErrorRecord first;
  if (!membership_.is_shared() || !records_.empty() || !membership_.first_error().read(&first)) {
    return;
  }
  file(first);
}

void Group::report(const std::vector<ErrorRecord>& records) {
  Failed failed;
  std::string first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hear_of_error();
    for (const ErrorRecord& record : records) file(record);
    if (membership_.is_shared()) membership_.first_error().publish(records.front());
    first = records_.front().second;
    failed = take_pending([](const CallSite&) { return true; });
  }
  const int32_t reporter = records.front().rank;
  const Window window = windows_.view(reporter);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    atomic32(window.control(rank, window.control_layout.poison()))
        .store(1 + static_cast<uint32_t>(reporter), std::memory_order_release);
    for (Channel channel : {kDispatchChannel, kCombineChannel}) {
      Doorbell(window.control(rank, window.control_layout.doorbell(channel))).ring();
    }
  }
  fail(std::move(failed), first);
}

void Group::expire(Clock::time_point now) {
  std::vector<ErrorRecord> late;
  Failed failed;
  std::string elsewhere;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hear_of_error();
    // Also what came before a rank of ours was refused on another process's word.
    if (!records_.empty()) {
      failed = take_pending([](const CallSite&) { return true; });
      elsewhere = records_.front().second;
    }
    for (const auto& [where, meetings] : pending_) {
      for (const Meeting& meeting : meetings) {
        if (meeting.deadline > now || !late.empty()) continue;
        const auto& parts = meeting.parts;
        const auto absent = std::find_if(parts.begin(), parts.end(),
                                         [](const auto& part) { return !part.has_value(); });
        const int32_t peer = ranks_[absent - parts.begin()];
        for (int seat = 0; seat < num_seats(); ++seat) {
          if (!parts[seat].has_value()) continue;
          const Operation& part = *parts[seat];
          late.push_back({ErrorKind::kTimeout, part.tag.op, WaitFor::kStart, ranks_[seat], peer,
                          next_epoch_[part.channel], 1, 0});
        }
      }
    }
  }
  fail(std::move(failed), elsewhere);
  // All at once: a caller that hears of the first may reset the buffer.
  if (!late.empty()) report(late);
}

std::vector<std::pair<ErrorRecord, std::string>> Group::error_records() {
  std::lock_guard<std::mutex> lock(mutex_);
  hear_of_error();
  return records_;
}

std::optional<std::pair<int, DataFault>> Group::take_data_faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::optional<std::pair<int, DataFault>> first;
  int64_t count = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    DataFault& fault = data_faults_[rank];
    if (fault.count > 0 && !first) first = {rank, fault};
    count += fault.count;
    fault = {};
  }
  if (first) first->second.count = count;
  return first;
}

}  // namespace jax_ep
