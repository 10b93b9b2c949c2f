#include "cpu/group.h"

#include <algorithm>
#include <thread>

#include "protocol/epochs.h"
#include "protocol/error_text.h"
#include "transport/host_signals.h"

namespace jax_ep {

namespace {

constexpr size_t kFailedRunsKept = 4096;  // more than can be queued when a run fails

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

Group::Group(const WindowLayout& layout, std::chrono::nanoseconds timeout, Payload payload,
             Membership membership)
    : timeout_(timeout),
      payload_(payload),
      membership_(std::move(membership)),
      ranks_(membership_.ranks_here(layout.shape.num_ranks)),
      windows_(layout, membership_.windows()),
      data_faults_(layout.shape.num_ranks) {
  std::fill_n(next_epoch_, kNumChannels, kFirstEpoch);
  for (int rank = 0; rank < layout.shape.num_ranks; ++rank) {
    faults_.push_back(std::make_unique<FaultPlan>());
    for (int channel = 0; channel < kNumChannels; ++channel) {
      contexts_.push_back(make_context(rank));
      strands_.emplace_back();
    }
  }
}

RankContext Group::make_context(int rank) {
  RankContext context{};
  context.window = windows_.view(rank);
  context.timeout = timeout_;
  context.faults = faults_[rank].get();
  context.report = [this](const ErrorRecord& record) { report(record); };
  if (membership_.is_shared()) {
    context.has_left = [this](int peer) { return membership_.has_left(peer); };
  }
  context.report_data_fault = [this, rank](const DataFault& fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    DataFault& kept = data_faults_[rank];
    const int64_t count = kept.count + fault.count;
    if (kept.count == 0) kept = fault;
    kept.count = count;
  };
  return context;
}

void Group::present(int rank, const CallSite& where, Operation operation) {
  std::optional<std::string> refused;
  const auto seat = std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
  // Processes instantiate call sites each in its own order.
  if (membership_.is_shared()) operation.tag.site = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused = refusal(where.run_id);
    if (!refused) {
      std::deque<Meeting>& meetings = pending_[where];
      auto meeting = std::find_if(meetings.begin(), meetings.end(),
                                  [&](const Meeting& m) { return !m.parts[seat].has_value(); });
      if (meeting == meetings.end()) {
        Meeting opened{};
        opened.parts.resize(ranks_.size());
        opened.deadline = Clock::now() + timeout_;
        meeting = meetings.insert(meetings.end(), std::move(opened));
      }
      meeting->parts[seat] = std::move(operation);
      if (++meeting->num_present < num_seats()) return;
      // Each rank fills its meetings in order, so the first to be complete is the front one.
      Meeting complete = std::move(meetings.front());
      meetings.pop_front();
      if (meetings.empty()) pending_.erase(where);
      start(std::move(complete));
      return;
    }
  }
  operation.done(&*refused);
}

std::optional<std::string> Group::refusal(int64_t run_id) {
  if (closed_) return closed_;
  hear_of_error();
  if (!records_.empty()) return records_.front().second;
  if (failed_runs_.count(run_id) > 0) {
    return "EpUsageError: this execution had already failed on another rank.";
  }
  return std::nullopt;
}

// Epochs are given and tasks queued under one lock: every rank's worker sees the same order.
void Group::start(Meeting meeting) {
  const Channel channel = meeting.parts[0]->channel;
  auto started = std::make_shared<Started>();
  started->first_epoch = next_epoch_[channel];
  next_epoch_[channel] += meeting.parts[0]->num_epochs;
  for (std::optional<Operation>& part : meeting.parts) started->parts.push_back(std::move(*part));
  share_operands(started.get());
  started->errors.resize(ranks_.size());
  started->num_running = num_seats();
  num_running_ += num_seats();
  for (int seat = 0; seat < num_seats(); ++seat) {
    strand(ranks_[seat], channel).submit([this, seat, started] {
      return carry_out(seat, started);
    });
  }
}

// Where shapes differ, so do tags, and nobody gets as far as a payload; but no bound may rest on
// that.
void Group::share_operands(Started* started) const {
  const std::vector<Operation>& parts = started->parts;
  const bool alike = std::all_of(parts.begin(), parts.end(), [&](const Operation& part) {
    return part.operands.same_shape(parts[0].operands);
  });
  if (payload_ == Payload::kWindow || !alike) return;
  OperandView elsewhere{};
  elsewhere.in_process = false;
  started->operands.assign(num_ranks(), elsewhere);
  for (int seat = 0; seat < num_seats(); ++seat) {
    started->operands[ranks_[seat]] = parts[seat].operands;
  }
}

// Operands live until the operation is done. Where peers read them in place, no part is done before
// all have ended, whether well or not: each ends by its deadlines.
Completion Group::carry_out(int seat, const std::shared_ptr<Started>& started) {
  if (!run_part(seat, *started)) started->errors[seat] = rank_error(ranks_[seat]);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --num_running_;
  }
  // A completion keeps the operation, and with it the buffer, while the strand is handed on.
  auto done = [started](int part) {
    const std::optional<std::string>& error = started->errors[part];
    started->parts[part].done(error ? &*error : nullptr);
  };
  if (started->operands.empty()) return [done, seat] { done(seat); };
  // Release: our last reads of the peers' operands. Acquire: theirs of ours, and their errors.
  if (started->num_running.fetch_sub(1, std::memory_order_acq_rel) > 1) return [started] {};
  for (int other = 0; other < num_seats(); ++other) {
    if (other != seat) StrandPool::instance().post([done, other] { done(other); });
  }
  return [done, seat] { done(seat); };
}

bool Group::run_part(int seat, const Started& started) {
  const int rank = ranks_[seat];
  const Operation& operation = started.parts[seat];
  RankContext& context = contexts_[rank * kNumChannels + operation.channel];
  context.operands = started.operands.empty() ? nullptr : started.operands.data();
  OpTag tag = operation.tag;
  bool sends = true;
#if defined(JAX_EP_TEST_HOOKS)
  FaultPlan& plan = fault_plan(rank);
  const FaultKind fault = plan.kind.load();
  if (fault == FaultKind::kLate) {
    std::this_thread::sleep_for(std::chrono::microseconds(plan.microseconds.load()));
  }
  if (fault == FaultKind::kWrongTag) tag.variant ^= 0x80000000u;
  sends = fault != FaultKind::kSkipSend;
  if (fault != FaultKind::kNone && fault != FaultKind::kJitter) plan.kind = FaultKind::kNone;
#endif
  const ControlLayout& control = context.window.control_layout;
  const bool poisoned = atomic32(context.window.control(rank, control.poison())).load() != 0;
  if (poisoned || (sends && !operation.run(context, tag, started.first_epoch))) return false;
  atomic64(context.window.control(rank, control.epoch(operation.channel)))
      .store(started.first_epoch + operation.num_epochs - 1, std::memory_order_release);
  return true;
}

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
bool Group::hear_of_error() {
  ErrorRecord first;
  if (!membership_.is_shared() || !records_.empty() || !membership_.first_error().read(&first)) {
    return false;
  }
  file(first);
  return true;
}

void Group::report(const ErrorRecord& record) {
  Failed failed;
  std::string first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hear_of_error();
    file(record);
    if (membership_.is_shared()) membership_.first_error().publish(record);
    first = records_.front().second;
    failed = take_pending([](const CallSite&) { return true; });
  }
  const Window window = windows_.view(record.rank);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    atomic32(window.control(rank, window.control_layout.poison()))
        .store(1 + static_cast<uint32_t>(record.rank), std::memory_order_release);
    for (Channel channel : {kDispatchChannel, kCombineChannel}) {
      Doorbell(window.control(rank, window.control_layout.doorbell(channel))).ring();
    }
  }
  fail(std::move(failed), first);
}

void Group::reject(int64_t run_id, const std::string& error) {
  Failed failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    remember_failed(run_id);
    failed = take_pending([&](const CallSite& where) { return where.run_id == run_id; });
  }
  fail(std::move(failed), error);
}

void Group::expire(Clock::time_point now) {
  std::vector<ErrorRecord> late;
  Failed failed;
  std::string elsewhere;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (hear_of_error()) {
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
  for (const ErrorRecord& record : late) report(record);
}

template <typename Chosen>
Group::Failed Group::take_pending(Chosen chosen) {
  Failed failed;
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!chosen(it->first)) {
      ++it;
      continue;
    }
    remember_failed(it->first.run_id);
    for (Meeting& meeting : it->second) {
      for (int seat = 0; seat < num_seats(); ++seat) {
        if (meeting.parts[seat]) {
          failed.emplace_back(ranks_[seat], std::move(*meeting.parts[seat]));
        }
      }
    }
    it = pending_.erase(it);
  }
  return failed;
}

void Group::remember_failed(int64_t run_id) {
  if (!failed_runs_.insert(run_id).second) return;
  failed_order_.push_back(run_id);
  if (failed_order_.size() <= kFailedRunsKept) return;
  failed_runs_.erase(failed_order_.front());
  failed_order_.pop_front();
}

void Group::fail(Failed failed, const std::string& error) {
  for (auto& [rank, operation] : failed) {
    auto part = std::make_shared<Operation>(std::move(operation));
    strand(rank, part->channel).submit([part, error] {
      return [part, error] { part->done(&error); };
    });
  }
}

void Group::close(const std::string& error) {
  Failed failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = error;
    failed = take_pending([](const CallSite&) { return true; });
  }
  fail(std::move(failed), error);
}

bool Group::drain(std::chrono::nanoseconds limit) {
  const auto end = Clock::now() + limit;
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const bool busy = num_running_ > 0 || !pending_.empty();
      if (!busy && std::all_of(strands_.begin(), strands_.end(),
                               [](Strand& strand) { return strand.idle(); })) {
        return true;
      }
    }
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Group::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  windows_.clear_signals(ranks_);
  if (membership_.is_shared()) membership_.first_error().clear();
  std::fill_n(next_epoch_, kNumChannels, kFirstEpoch);
  records_.clear();
  for (auto& plan : faults_) plan->kind = FaultKind::kNone;
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

uint64_t Group::epochs(Channel channel) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_epoch_[channel] - kFirstEpoch;
}

}  // namespace jax_ep
