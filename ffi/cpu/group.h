// One group of ranks: matches the presentations of an operation by those in this process, gives it
// its epochs once all of these have come, and has each rank's worker carry it out. Other processes
// that have ranks of the group count epochs by themselves, and tags tell where they disagree.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cpu/faults.h"
#include "cpu/membership.h"
#include "cpu/open_starts.h"
#include "cpu/rank_context.h"
#include "cpu/strand.h"
#include "transport/host_window.h"

namespace jax_ep {

// Identifies an operation of a program: which execution, and which instruction of it. Presentations
// of one rank under one site are told apart by their order.
struct CallSite {
  int64_t run_id;
  uint64_t site;
  bool operator<(const CallSite& other) const {
    return std::pair(run_id, site) < std::pair(other.run_id, other.site);
  }
};

// One rank's part of an operation.
struct Operation {
  OpTag tag;
  Channel channel;
  int num_epochs;
  OperandView operands{};  // of a whole operation
  // Carries it out; false when a wait was given up. Where there is a `send`, that is called first,
  // in a task of its own, and `run` does the rest.
  using Part = std::function<bool(RankContext&, const OpTag&, uint64_t first_epoch)>;
  Part send;
  Part run;
  std::function<void(const std::string* error)> done;  // null: success. Called exactly once.
  Half half = Half::kWhole;
  StartTicket ticket{};        // of a done: what its start handed out
  void* ticket_out = nullptr;  // of a start: where its ticket goes
};

class Group {
 public:
  using Clock = std::chrono::steady_clock;

  Group(const WindowLayout& layout, std::chrono::nanoseconds timeout,
        Payload payload = Payload::kReference, Membership membership = {});

  int num_ranks() const { return static_cast<int>(faults_.size()); }
  Payload payload() const { return payload_; }
  FaultPlan& fault_plan(int rank) { return *faults_[rank]; }

  // The rank, of this process, is ready for the operation. Does not block; operation.done follows.
  void present(int rank, const CallSite& where, Operation operation);
  // A rank cannot take part in this run: nobody else of the run waits for it.
  void reject(int64_t run_id, const std::string& error);
  // Gives up on operations that some rank did not start in time.
  void expire(Clock::time_point now);

  // Waits until nothing is pending or running; false after `limit`.
  bool drain(std::chrono::nanoseconds limit);
  // Refuses everything from here on, with this error; what is pending fails.
  void close(const std::string& error);
  // After drain() in every process: healthy again, epochs from the start. Nobody may begin an
  // operation before all have done this.
  void reset();

  std::vector<std::pair<ErrorRecord, std::string>> error_records();
  // Sum of the faults since the last call, with the first fault of the lowest rank.
  std::optional<std::pair<int, DataFault>> take_data_faults();
  uint64_t epochs(Channel channel) const;

 private:
  // Of the ranks of this process for one operation. What is "by seat" has an entry for each of
  // these, in the order of ranks_.
  struct Meeting {
    std::vector<std::optional<Operation>> parts;  // by seat
    int num_present = 0;
    Clock::time_point deadline;
  };
  // How a rank's part of an operation began.
  struct Beginning {
    enum { kWell, kSilent, kFailed } how = kWell;  // kSilent: a test wants nothing to be sent
    OpTag tag{};
  };
  // An operation that all ranks of this process have presented.
  struct Started {
    std::vector<Operation> parts;                    // by seat
    std::vector<OperandView> operands;               // by rank; empty: windows carry the payload
    std::vector<std::optional<std::string>> errors;  // by seat, of parts that have ended
    std::vector<Beginning> beginnings;               // by seat
    std::atomic<int> num_running;
    uint64_t first_epoch;
    uint64_t read_through;          // as in RankContext
    StartTicket ticket;             // of a start
    std::optional<OpTag> of_start;  // of a done: what was sent
  };
  using Failed = std::vector<std::pair<int, Operation>>;

  Strand& strand(int rank, Channel channel) { return strands_[rank * kNumChannels + channel]; }
  RankContext make_context(int rank);
  int num_seats() const { return static_cast<int>(ranks_.size()); }
  std::optional<std::string> refusal(int64_t run_id);  // mutex held
  void start(int64_t run_id, Meeting meeting);         // mutex held
  // Gives an operation its epochs, or the reason why it gets none. Mutex held.
  std::optional<std::string> assign_epochs(Started* started);
  void share_operands(Started* started) const;
  Completion carry_out(int seat, const std::shared_ptr<Started>& started);
  Beginning begin_part(int seat, const Started& started);
  bool run_part(int seat, const Started& started);
  RankContext& context_of(int seat, const Started& started) {
    return contexts_[ranks_[seat] * kNumChannels + started.parts[seat].channel];
  }
  // Files records, poisons the group and fails what is pending.
  void report(const std::vector<ErrorRecord>& records);
  void file(const ErrorRecord& record);  // mutex held
  void hear_of_error();                  // in another process, the first time; mutex held
  std::string rank_error(int rank);
  void remember_failed(int64_t run_id);                                     // mutex held
  Failed take_pending(const std::function<bool(const CallSite&)>& chosen);  // mutex held
  void fail(Failed failed, const std::string& error);

  const std::chrono::nanoseconds timeout_;
  const Payload payload_;
  const Membership membership_;
  const std::vector<int> ranks_;  // of this process, ascending
  HostWindows windows_;
  std::vector<std::unique_ptr<FaultPlan>> faults_;  // by rank
  std::vector<RankContext> contexts_;               // by rank and channel, as strands_
  std::deque<Strand> strands_;

  mutable std::mutex mutex_;
  std::map<CallSite, std::deque<Meeting>> pending_;
  uint64_t next_epoch_[kNumChannels];
  OpenStarts open_starts_[kNumChannels];
  std::vector<std::pair<ErrorRecord, std::string>> records_;
  std::vector<DataFault> data_faults_;  // by rank
  std::unordered_set<int64_t> failed_runs_;
  std::deque<int64_t> failed_order_;
  std::optional<std::string> closed_;
  int num_running_ = 0;
};

}  // namespace jax_ep
