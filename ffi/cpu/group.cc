#include "cpu/group.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "protocol/epochs.h"
#include "protocol/error_text.h"
#include "transport/host_signals.h"

namespace jax_ep {

namespace {

constexpr size_t kFailedRunsKept = 4096;  // more than can be queued when a run fails

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
  context.report = [this](const ErrorRecord& record) { report({record}); };
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
      start(where.run_id, std::move(complete));
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
void Group::start(int64_t run_id, Meeting meeting) {
  const Channel channel = meeting.parts[0]->channel;
  auto started = std::make_shared<Started>();
  for (std::optional<Operation>& part : meeting.parts) started->parts.push_back(std::move(*part));
  if (const auto refused = assign_epochs(started.get())) {
    // Nobody of the run is to wait for a rank that stops here.
    remember_failed(run_id);
    Failed failed = take_pending([&](const CallSite& where) { return where.run_id == run_id; });
    for (int seat = 0; seat < num_seats(); ++seat) {
      failed.emplace_back(ranks_[seat], std::move(started->parts[seat]));
    }
    fail(std::move(failed), *refused);
    return;
  }
  share_operands(started.get());
  started->errors.resize(ranks_.size());
  started->beginnings.resize(ranks_.size());
  started->num_running = num_seats();
  num_running_ += num_seats();
  // All that can be sent first is queued before what waits for it: on few cores, a thread that
  // waits for a rank that has no thread yet costs more than a small operation.
  for (int seat = 0; seat < num_seats(); ++seat) {
    if (!started->parts[seat].send) continue;
    strand(ranks_[seat], channel).submit([this, seat, started] {
      started->beginnings[seat] = begin_part(seat, *started);
      return Completion();
    });
  }
  for (int seat = 0; seat < num_seats(); ++seat) {
    strand(ranks_[seat], channel).submit([this, seat, started] {
      return carry_out(seat, started);
    });
  }
}

std::optional<std::string> Group::assign_epochs(Started* started) {
  const std::vector<Operation>& parts = started->parts;
  const Operation& first = parts[0];
  OpenStarts& open = open_starts_[first.channel];
  uint64_t& next = next_epoch_[first.channel];
  if (first.half == Half::kDone) {
    const bool agreed = std::all_of(parts.begin(), parts.end(), [&](const Operation& part) {
      return same_ticket(part.ticket, first.ticket);
    });
    const auto start = agreed ? open.close(first.ticket) : std::nullopt;
    if (!start) return unknown_start_text(first.tag.op, first.ticket.epoch);
    started->first_epoch = start->epoch;
    started->of_start = start->tag;
  } else {
    const uint64_t last = next + first.num_epochs - 1;
    if (!open.admits(last)) return open_start_text(first.tag.op, last, open.oldest());
    started->first_epoch = next;
    if (first.half == Half::kStart) started->ticket = open.open(next, first.tag);
    next = last + 1;
  }
  started->read_through = open.read_through(next);
  return std::nullopt;
}

// Where shapes differ, so do tags, and nobody gets as far as a payload; but no bound may rest on
// that. A half outlives no other rank's, so windows carry what halves send.
void Group::share_operands(Started* started) const {
  const std::vector<Operation>& parts = started->parts;
  const bool alike = std::all_of(parts.begin(), parts.end(), [&](const Operation& part) {
    return part.operands.same_shape(parts[0].operands);
  });
  if (payload_ == Payload::kWindow || parts[0].half != Half::kWhole || !alike) return;
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
  if (!started->parts[seat].send) started->beginnings[seat] = begin_part(seat, *started);
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

Group::Beginning Group::begin_part(int seat, const Started& started) {
  const int rank = ranks_[seat];
  const Operation& operation = started.parts[seat];
  RankContext& context = context_of(seat, started);
  context.operands = started.operands.empty() ? nullptr : started.operands.data();
  context.read_through = started.read_through;
  if (operation.ticket_out != nullptr) {
    std::memcpy(operation.ticket_out, &started.ticket, sizeof(started.ticket));
  }
  Beginning beginning{Beginning::kWell, started.of_start.value_or(operation.tag)};
#if defined(JAX_EP_TEST_HOOKS)
  FaultPlan& plan = fault_plan(rank);
  const FaultKind fault = plan.kind.load();
  if (fault == FaultKind::kLate) {
    std::this_thread::sleep_for(std::chrono::microseconds(plan.microseconds.load()));
  }
  if (fault == FaultKind::kWrongTag) beginning.tag.variant ^= 0x80000000u;
  if (fault == FaultKind::kSkipSend) beginning.how = Beginning::kSilent;
  if (fault != FaultKind::kNone && fault != FaultKind::kJitter) plan.kind = FaultKind::kNone;
#endif
  const ControlLayout& control = context.window.control_layout;
  const bool poisoned = atomic32(context.window.control(rank, control.poison())).load() != 0;
  const bool sends = beginning.how == Beginning::kWell && operation.send != nullptr;
  if (poisoned || (sends && !operation.send(context, beginning.tag, started.first_epoch))) {
    beginning.how = Beginning::kFailed;
  }
  return beginning;
}

bool Group::run_part(int seat, const Started& started) {
  const int rank = ranks_[seat];
  const Operation& operation = started.parts[seat];
  RankContext& context = context_of(seat, started);
  const Beginning& beginning = started.beginnings[seat];
  if (beginning.how == Beginning::kFailed) return false;
  if (beginning.how == Beginning::kWell &&
      !operation.run(context, beginning.tag, started.first_epoch)) {
    return false;
  }
  const ControlLayout& control = context.window.control_layout;
  atomic64(context.window.control(rank, control.epoch(operation.channel)))
      .store(started.read_through, std::memory_order_release);
  return true;
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

Group::Failed Group::take_pending(const std::function<bool(const CallSite&)>& chosen) {
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
  for (OpenStarts& open : open_starts_) open.forget();
  records_.clear();
  for (auto& plan : faults_) plan->kind = FaultKind::kNone;
}

uint64_t Group::epochs(Channel channel) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_epoch_[channel] - kFirstEpoch;
}

}  // namespace jax_ep
