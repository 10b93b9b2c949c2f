#include "cpu/notify.h"

#include <algorithm>

#include "cpu/route.h"
#include "cpu/session.h"
#include "protocol/epochs.h"
#include "transport/mapped_counters.h"

namespace jax_ep {

namespace {

class Notify {
 public:
  Notify(RankContext& context, const NotifyArgs& args, const OpTag& tag)
      : context_(context),
        args_(args),
        session_(context, kDispatchChannel, tag),
        layout_(context.window.layout),
        shape_(layout_.shape) {}

  bool run(uint64_t epoch);

 private:
  void send_counts(uint64_t epoch);
  bool receive_counts(uint64_t epoch);
  void tell_host() const;
  void write_row_indices() const;
  int32_t* counts_of(int source) const {
    return args_.counts + static_cast<int64_t>(source) * shape_.num_experts;
  }

  RankContext& context_;
  const NotifyArgs& args_;
  Session session_;
  const WindowLayout& layout_;
  const WindowShape& shape_;
};

bool Notify::run(uint64_t epoch) {
  const DataFault faults =
      route_tokens(context_, args_.topk_idx, args_.num_tokens, args_.clean_topk_idx);
  if (faults.count > 0) context_.report_data_fault(faults);
  if (!session_.wait_credits(epoch)) return false;
  session_.send_tags(epoch);
  send_counts(epoch);
  session_.ring_all();
  if (!session_.check_tags(epoch) || !receive_counts(epoch)) return false;
  session_.send_credits(epoch);
  if (args_.ticket != kNoTicket) tell_host();
  write_row_indices();
  return true;
}

void Notify::send_counts(uint64_t epoch) {
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int peer = session_.peer(step);
    for (int expert = 0; expert < shape_.num_experts; ++expert) {
      session_.send_word(peer, layout_.notify_count(parity_of(epoch), session_.rank(), expert),
                         epoch_word(epoch, static_cast<uint32_t>(context_.counts[expert])));
    }
  }
}

bool Notify::receive_counts(uint64_t epoch) {
  std::copy_n(context_.counts.data(), shape_.num_experts, counts_of(session_.rank()));
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int source = session_.peer(step);
    for (int expert = 0; expert < shape_.num_experts; ++expert) {
      uint64_t word = 0;
      const int64_t offset = layout_.notify_count(parity_of(epoch), source, expert);
      if (!session_.wait_word(source, offset, epoch, WaitFor::kCount, &word)) return false;
      // A count that no rank can have sent is taken for none, as in dispatch.
      const uint32_t count = word_value(word);
      const bool possible = count <= static_cast<uint32_t>(args_.num_tokens);
      counts_of(source)[expert] = possible ? static_cast<int32_t>(count) : 0;
    }
  }
  return true;
}

void Notify::tell_host() const {
  const NoticeLayout notice{shape_.num_experts};
  const int experts_per_rank = shape_.experts_per_rank();
  uint64_t here = 0;
  for (int expert = 0; expert < shape_.num_experts; ++expert) {
    uint64_t rows = 0;
    for (int source = 0; source < shape_.num_ranks; ++source) rows += counts_of(source)[expert];
    if (expert / experts_per_rank == session_.rank()) here += rows;
    store_counter(args_.counters, notice.expert_tokens(args_.ticket, expert), args_.ticket, rows);
  }
  store_counter(args_.counters, notice.recv_tokens(args_.ticket), args_.ticket, here);
}

void Notify::write_row_indices() const {
  const auto num_entries = static_cast<int64_t>(context_.routes.size());
  for (int64_t entry = 0; entry < num_entries; ++entry) {
    const uint32_t route = context_.routes[entry];
    args_.row_index[entry] = route == kNoRoute ? -1 : route_index(route);
  }
}

}  // namespace

bool run_notify(RankContext& context, const NotifyArgs& args, const OpTag& tag, uint64_t epoch) {
  return Notify(context, args, tag).run(epoch);
}

}  // namespace jax_ep
