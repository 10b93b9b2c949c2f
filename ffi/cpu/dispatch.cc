#include "cpu/dispatch.h"

#include <algorithm>
#include <cstring>

#include "cpu/session.h"
#include "protocol/epochs.h"

namespace jax_ep {

namespace {

constexpr int kMessagesAhead = 4;
constexpr int kTokensPerRing = 64;  // a wake-up costs as much as copying some tens of rows

class Dispatch {
 public:
  Dispatch(RankContext& context, const DispatchArgs& args, const OpTag& tag)
      : context_(context),
        args_(args),
        session_(context, kDispatchChannel, tag),
        layout_(context.window.layout),
        shape_(layout_.shape),
        rows_(args.float8, args.tokens, shape_.row_bytes, context.wire_rows),
        message_{std::max(shape_.row_bytes, rows_.packed_bytes()), shape_.num_experts_per_tok},
        experts_per_rank_(shape_.experts_per_rank()) {}

  bool run(uint64_t first_epoch);
  bool start(uint64_t epoch);
  bool receive(uint64_t epoch);
  bool done(uint64_t epoch);

 private:
  void route(bool report_faults = true);
  void send_counts(uint64_t epoch);
  void send_chunk(uint64_t epoch, TokenRange tokens);
  void send_token(uint64_t epoch, int token, int slot);
  void write_message(char* to, int peer, int token, const char* packed);
  bool receive_counts(uint64_t epoch);
  void place_rows();
  void expand_own();
  bool receive_chunk(uint64_t epoch, TokenRange tokens);
  void prefetch_record(int parity, int source, int slot) const;
  void expand_message(const char* from, int source, int token);
  void expand(const char* row, int source, int token, int k, uint32_t route, float weight);
  void fill_slot(const char* row, int source, int token);
  void zero_rows(int64_t begin, int64_t end);

  RankContext& context_;
  const DispatchArgs& args_;
  Session session_;
  const WindowLayout& layout_;
  const WindowShape& shape_;
  WireRows rows_;
  // As the shape's, and in slots of its size. Of the rows only those of 16 bytes grow in float8, to
  // 20, where 20 + 8K bytes leave room for 4 more before a multiple of 128.
  MessageFormat message_;
  int experts_per_rank_;
};

bool Dispatch::run(uint64_t first_epoch) {
  const int num_chunks = num_epochs(args_.num_tokens, shape_.tokens_per_epoch);
  auto tokens_of = [&](int chunk) {
    return chunk_tokens(args_.num_tokens, shape_.tokens_per_epoch, chunk);
  };
  route();
  // The two buffers are a pipeline: peers fill one while we expand the other.
  for (int chunk = 0; chunk <= num_chunks; ++chunk) {
    const uint64_t epoch = first_epoch + chunk;
    if (chunk < num_chunks) {
      if (!session_.wait_credits(epoch)) return false;
      session_.send_tags(epoch);
      // Ahead of any payload: behind it they would queue.
      if (chunk == 0) send_counts(epoch);
      session_.ring_all();
      send_chunk(epoch, tokens_of(chunk));
    }
    if (chunk == 0) {
      if (!session_.check_tags(epoch) || !receive_counts(epoch)) return false;
      place_rows();
      expand_own();
    } else {
      if (chunk > 1 && !session_.check_tags(epoch - 1)) return false;
      if (!receive_chunk(epoch - 1, tokens_of(chunk - 1))) return false;
      session_.send_credits(epoch - 1);
    }
  }
  return true;
}

bool Dispatch::start(uint64_t epoch) {
  route();
  if (!session_.wait_credits(epoch)) return false;
  session_.send_tags(epoch);
  send_counts(epoch);
  session_.ring_all();
  send_chunk(epoch, {0, args_.num_tokens});
  return true;
}

bool Dispatch::receive(uint64_t epoch) {
  if (!session_.check_tags(epoch) || !receive_counts(epoch)) return false;
  place_rows();
  expand_own();
  if (!receive_chunk(epoch, {0, args_.num_tokens})) return false;
  session_.send_credits(context_.read_through);
  return true;
}

bool Dispatch::done(uint64_t epoch) {
  // Again: cheaper than keeping it, with another operation between the halves.
  route(/*report_faults=*/false);
  return receive(epoch);
}

void Dispatch::route(bool report_faults) {
  if (args_.route.present()) {
    adopt_entries(context_, args_.route, args_.topk_idx, args_.num_tokens);
    return;
  }
  const DataFault faults =
      route_tokens(context_, args_.topk_idx, args_.num_tokens, args_.clean_topk_idx);
  if (report_faults && faults.count > 0) context_.report_data_fault(faults);
}

void Dispatch::send_counts(uint64_t epoch) {
  if (args_.route.present()) return;  // every rank knows them
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int peer = session_.peer(step);
    for (int expert = 0; expert < experts_per_rank_; ++expert) {
      const int32_t count = context_.counts[peer * experts_per_rank_ + expert];
      session_.send_word(peer, layout_.dispatch_count(parity_of(epoch), session_.rank(), expert),
                         epoch_word(epoch, static_cast<uint32_t>(count)));
    }
  }
}

void Dispatch::send_chunk(uint64_t epoch, TokenRange tokens) {
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const int slot = token - tokens.begin;
    session_.jitter();
    send_token(epoch, token, slot);
    if (slot % kTokensPerRing == kTokensPerRing - 1) session_.ring_all();
  }
  session_.ring_all();
}

void Dispatch::send_token(uint64_t epoch, int token, int slot) {
  const int topk = shape_.num_experts_per_tok;
  const int32_t* owners = &context_.owners[static_cast<size_t>(token) * topk];
  const int parity = parity_of(epoch);
  const int rank = session_.rank();
  const char* packed = nullptr;  // packed once for all peers
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int peer = session_.peer(step);
    const bool needed = std::find(owners, owners + topk, peer) != owners + topk;
    if (needed) {
      const bool carried = context_.operands_of(peer) == nullptr;
      if (carried && packed == nullptr) packed = rows_.pack(args_.x + token * shape_.row_bytes);
      char* to = session_.window().data(peer, layout_.dispatch_message(parity, rank, slot));
      write_message(to, peer, token, carried ? packed : nullptr);
    }
    session_.send_flag(peer, layout_.dispatch_flag(parity, rank, slot), epoch, needed);
  }
}

// packed: null where the peer reads the row in place.
void Dispatch::write_message(char* to, int peer, int token, const char* packed) {
  const int topk = shape_.num_experts_per_tok;
  const int64_t first = static_cast<int64_t>(token) * topk;
  if (packed != nullptr) std::memcpy(to, packed, rows_.packed_bytes());
  const int32_t source_token = token;
  std::memcpy(to + message_.source_offset(), &source_token, sizeof(source_token));
  for (int k = 0; k < topk; ++k) {
    const bool theirs = context_.owners[first + k] == peer;
    const RouteEntry entry{theirs ? context_.routes[first + k] : kNoRoute,
                           args_.topk_weights[first + k]};
    std::memcpy(to + message_.entry_offset(k), &entry, sizeof(entry));
  }
}

bool Dispatch::receive_counts(uint64_t epoch) {
  if (args_.route.present()) {
    adopt_counts(context_, args_.route, args_.num_tokens);
    return true;
  }
  const int num_ranks = session_.num_ranks();
  const int rank = session_.rank();
  context_.received.resize(static_cast<size_t>(experts_per_rank_) * num_ranks);
  for (int expert = 0; expert < experts_per_rank_; ++expert) {
    context_.received[expert * num_ranks + rank] =
        context_.counts[rank * experts_per_rank_ + expert];
  }
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int source = session_.peer(step);
    for (int expert = 0; expert < experts_per_rank_; ++expert) {
      uint64_t word = 0;
      const int64_t offset = layout_.dispatch_count(parity_of(epoch), source, expert);
      if (!session_.wait_word(source, offset, epoch, WaitFor::kCount, &word)) return false;
      // A count that no rank can have sent is taken for none: it must not move other rows.
      const uint32_t count = word_value(word);
      const bool possible = count <= static_cast<uint32_t>(args_.num_tokens);
      context_.received[expert * num_ranks + source] = possible ? static_cast<int32_t>(count) : 0;
    }
  }
  return true;
}

void Dispatch::place_rows() {
  const int num_ranks = session_.num_ranks();
  const int64_t num_handle_rows = static_cast<int64_t>(num_ranks) * args_.num_tokens;
  context_.bases = context_.received;
  std::fill_n(args_.recv_rows, num_handle_rows * shape_.num_experts_per_tok, -1);
  std::fill_n(args_.weights, args_.capacity, 0.0f);
  if (args_.row_map != nullptr) {
    std::fill_n(args_.row_map, args_.capacity, static_cast<int32_t>(num_handle_rows));
  }
  int64_t begin = 0;
  int64_t dropped = 0;
  for (int expert = 0; expert < experts_per_rank_; ++expert) {
    if (args_.expert_rows > 0) begin = expert * args_.expert_rows;
    const ExpertSegment segment = place_expert(&context_.bases[expert * num_ranks], num_ranks,
                                               args_.num_tokens, begin, args_.expert_alignment);
    const int group = segment.group_size(args_.capacity);
    const int valid = segment.valid_size(args_.capacity);
    args_.group_sizes[expert] = group;
    args_.valid_sizes[expert] = valid;
    dropped += segment.true_rows - valid;
    zero_rows(begin + valid, begin + group);
    begin += segment.padded_rows;
  }
  *args_.num_dropped = static_cast<int32_t>(dropped);
  if (args_.zero_tail) zero_rows(begin, args_.capacity);
}

void Dispatch::zero_rows(int64_t begin, int64_t end) {
  end = std::min(end, args_.capacity);
  if (begin >= end || args_.row_map != nullptr) return;
  rows_.put_zeros(begin, end);
}

void Dispatch::expand_own() {
  const int topk = shape_.num_experts_per_tok;
  const int rank = session_.rank();
  for (int token = 0; token < args_.num_tokens; ++token) {
    const int64_t first = static_cast<int64_t>(token) * topk;
    const char* row = nullptr;
    for (int k = 0; k < topk; ++k) {
      if (context_.owners[first + k] != rank) continue;
      if (row == nullptr) row = rows_.open(rows_.pack(args_.x + token * shape_.row_bytes));
      expand(row, rank, token, k, context_.routes[first + k], args_.topk_weights[first + k]);
    }
    if (args_.row_map != nullptr) fill_slot(row, rank, token);
  }
}

bool Dispatch::receive_chunk(uint64_t epoch, TokenRange tokens) {
  const int parity = parity_of(epoch);
  const int num_peers = session_.num_peers();
  std::vector<int> next(num_peers, 0);  // slots of each peer that are done
  auto flag_of = [&](int step) {
    return layout_.dispatch_flag(parity, session_.peer(step), next[step]);
  };
  for (int open = tokens.size() > 0 ? num_peers : 0; open > 0;) {
    bool progress = false;
    int waiting = -1;
    open = 0;
    for (int step = 0; step < num_peers; ++step) {
      const int source = session_.peer(step);
      Arrival arrival = Arrival::kAbsent;
      while (next[step] < tokens.size()) {
        arrival = session_.poll_flag(flag_of(step), epoch);
        if (arrival == Arrival::kPending) break;
        if (arrival == Arrival::kArrived) {
          prefetch_record(parity, source, next[step] + kMessagesAhead);
          const int64_t message = layout_.dispatch_message(parity, source, next[step]);
          expand_message(session_.window().data(session_.rank(), message), source,
                         tokens.begin + next[step]);
        } else if (args_.row_map != nullptr) {
          fill_slot(nullptr, source, tokens.begin + next[step]);
        }
        ++next[step];
        progress = true;
      }
      if (next[step] == tokens.size()) continue;
      ++open;
      if (waiting < 0) waiting = step;
    }
    if (open == 0 || progress) continue;
    Arrival arrival;
    if (!session_.wait_flag(session_.peer(waiting), flag_of(waiting), epoch, &arrival)) {
      return false;
    }
  }
  return true;
}

// Records are far apart: without this, each is a miss that the copying of rows waits for.
void Dispatch::prefetch_record(int parity, int source, int slot) const {
  if (slot >= shape_.tokens_per_epoch) return;
  const char* message =
      session_.window().data(session_.rank(), layout_.dispatch_message(parity, source, slot));
  prefetch_bytes(message + message_.source_offset(), message_.bytes() - message_.source_offset());
}

void Dispatch::expand_message(const char* from, int source, int token) {
  const OperandView* operands = context_.operands_of(source);
  const char* packed =
      operands != nullptr ? rows_.pack(operands->rows + token * shape_.row_bytes) : from;
  const char* row = rows_.open(packed);
  for (int k = 0; k < shape_.num_experts_per_tok; ++k) {
    RouteEntry entry;
    std::memcpy(&entry, from + message_.entry_offset(k), sizeof(entry));
    if (entry.route != kNoRoute) expand(row, source, token, k, entry.route, entry.weight);
  }
  if (args_.row_map != nullptr) fill_slot(row, source, token);
}

void Dispatch::expand(const char* row, int source, int token, int k, uint32_t route, float weight) {
  // Routes come from a peer's memory: whatever they hold, they must not address past our arrays.
  const int expert = route_expert(route);
  const int index = route_index(route);
  if (expert >= experts_per_rank_) return;
  const int64_t pair = static_cast<int64_t>(expert) * session_.num_ranks() + source;
  if (index >= context_.received[pair]) return;
  const int64_t to = int64_t{context_.bases[pair]} + index;
  if (to < 0 || to >= args_.capacity) return;  // dropped: counted in place_rows
  const int64_t slot = static_cast<int64_t>(source) * args_.num_tokens + token;
  if (args_.row_map == nullptr) {
    rows_.put(to, row);
  } else {
    args_.row_map[to] = static_cast<int32_t>(slot);
  }
  args_.weights[to] = weight;
  args_.recv_rows[slot * shape_.num_experts_per_tok + k] = static_cast<int32_t>(to);
}

// Without expansion: every slot is written exactly once, after its routes. `row` is read only if
// one of them led to a row; it is as rows_.open() gave it.
void Dispatch::fill_slot(const char* row, int source, int token) {
  const int topk = shape_.num_experts_per_tok;
  const int64_t slot = static_cast<int64_t>(source) * args_.num_tokens + token;
  const int32_t* rows = args_.recv_rows + slot * topk;
  if (row != nullptr && std::any_of(rows, rows + topk, [](int32_t at) { return at >= 0; })) {
    rows_.put(slot, row);
  } else {
    rows_.put_zeros(slot, slot + 1);
  }
}

}  // namespace

bool run_dispatch(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                  uint64_t first_epoch) {
  return Dispatch(context, args, tag).run(first_epoch);
}

bool run_dispatch_start(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                        uint64_t epoch) {
  return Dispatch(context, args, tag).start(epoch);
}

bool run_dispatch_receive(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                          uint64_t epoch) {
  return Dispatch(context, args, tag).receive(epoch);
}

bool run_dispatch_done(RankContext& context, const DispatchArgs& args, const OpTag& tag,
                       uint64_t epoch) {
  return Dispatch(context, args, tag).done(epoch);
}

}  // namespace jax_ep
