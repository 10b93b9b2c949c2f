#include "cpu/combine.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/row_math.h"
#include "cpu/session.h"
#include "protocol/epochs.h"

namespace jax_ep {

namespace {

constexpr int kTokensPerRing = 64;
// Of each row, ahead of its sum: the hardware's own prefetching follows once it has begun.
constexpr int64_t kPrefetchBytes = 512;

// The terms of one token's sum. A handle may name K rows for each of K ranks.
struct Terms {
  std::array<RowTerm, kMaxExpertsPerTok * kMaxExpertsPerTok> term;
  std::array<RowPart, kMaxExpertsPerTok> part;
  int size = 0;
  int num_parts = 0;

  // Of the rank whose terms follow. What is not rounded makes one part with its neighbours.
  void begin_part(bool rounded) {
    if (num_parts > 0 && !rounded && !part[num_parts - 1].rounded) return;
    part[num_parts++] = {0, rounded};
  }
  void add(const char* row, float weight) {
    term[size++] = {row, weight};
    ++part[num_parts - 1].num_terms;
  }
};

// The ranks that hold the experts of one token, by k; -1 for none.
struct Owners {
  std::array<int, kMaxExpertsPerTok> rank;
  int size;
  bool name(int source) const {
    return std::find(rank.begin(), rank.begin() + size, source) != rank.begin() + size;
  }
};

class Combine {
 public:
  Combine(RankContext& context, const CombineArgs& args, const OpTag& tag)
      : context_(context),
        args_(args),
        own_(args.view()),
        session_(context, kCombineChannel, tag),
        layout_(context.window.layout),
        shape_(layout_.shape),
        topk_(shape_.num_experts_per_tok),
        experts_per_rank_(shape_.experts_per_rank()) {}

  bool run(uint64_t first_epoch);
  bool start(uint64_t epoch);
  bool done(uint64_t epoch);

 private:
  void send_chunk(uint64_t epoch, TokenRange tokens);
  void send_token(uint64_t epoch, int peer, int token, int slot);
  void write_partial_sum(int parity, int peer, int token, int slot) const;
  bool receive_chunk(uint64_t epoch, TokenRange tokens);
  bool gather_terms(uint64_t epoch, int token, int slot, Terms* terms);
  void sum_terms(const Terms& terms, int token) const;
  Owners owners_of(int token) const;
  void take_rows(const OperandView& from, int source, int token, const Owners& owners,
                 Terms* terms) const;
  void take_partial_sum(int parity, int source, int token, int slot, const Owners& owners,
                        Terms* terms) const;
  float* scalars_of(int token) const;
  bool has_rows(int token_rank, int token) const;
  // Adds the rows that `from` computed for a token of `token_rank`, in k order.
  void add_rows(const OperandView& from, int token_rank, int token, Terms* terms) const;
  void add_slot(const OperandView& from, int token_rank, int token, Terms* terms) const;
  float scalar_of(const OperandView& from, int token_rank, int token, int k) const;
  int32_t row_of(const OperandView& from, int token_rank, int token, int k) const;

  const RankContext& context_;
  const CombineArgs& args_;
  const OperandView own_;
  Session session_;
  const WindowLayout& layout_;
  const WindowShape& shape_;
  int topk_;
  int experts_per_rank_;
};

bool Combine::run(uint64_t first_epoch) {
  const int num_chunks = num_epochs(args_.num_tokens, shape_.tokens_per_epoch);
  for (int chunk = 0; chunk <= num_chunks; ++chunk) {
    const uint64_t epoch = first_epoch + chunk;
    if (chunk < num_chunks) {
      if (!session_.wait_credits(epoch)) return false;
      session_.send_tags(epoch);
      session_.ring_all();
      send_chunk(epoch, chunk_tokens(args_.num_tokens, shape_.tokens_per_epoch, chunk));
    }
    if (chunk > 0) {
      const TokenRange tokens = chunk_tokens(args_.num_tokens, shape_.tokens_per_epoch, chunk - 1);
      if (!session_.check_tags(epoch - 1) || !receive_chunk(epoch - 1, tokens)) return false;
      session_.send_credits(epoch - 1);
    }
  }
  return true;
}

bool Combine::start(uint64_t epoch) {
  if (!session_.wait_credits(epoch)) return false;
  session_.send_tags(epoch);
  session_.ring_all();
  send_chunk(epoch, {0, args_.num_tokens});
  return true;
}

bool Combine::done(uint64_t epoch) {
  if (!session_.check_tags(epoch) || !receive_chunk(epoch, {0, args_.num_tokens})) return false;
  session_.send_credits(context_.read_through);
  return true;
}

void Combine::send_chunk(uint64_t epoch, TokenRange tokens) {
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int peer = session_.peer(step);
    for (int token = tokens.begin; token < tokens.end; ++token) {
      const int slot = token - tokens.begin;
      session_.jitter();
      send_token(epoch, peer, token, slot);
      if (slot % kTokensPerRing == kTokensPerRing - 1) session_.ring(peer);
    }
    session_.ring(peer);
  }
}

void Combine::send_token(uint64_t epoch, int peer, int token, int slot) {
  const int parity = parity_of(epoch);
  const bool sends = has_rows(peer, token);
  if (sends && context_.operands_of(peer) == nullptr) write_partial_sum(parity, peer, token, slot);
  session_.send_flag(peer, layout_.combine_flag(parity, session_.rank(), slot), epoch, sends);
}

void Combine::write_partial_sum(int parity, int peer, int token, int slot) const {
  const int rank = session_.rank();
  const Window& window = session_.window();
  Terms terms;
  terms.begin_part(false);
  add_rows(own_, peer, token, &terms);
  char* to = window.data(peer, layout_.combine_row(parity, rank, slot));
  row_math().sum(terms.term.data(), terms.size, to, args_.hidden, args_.row_type);
  if (args_.row_scalars == nullptr) return;
  char* scalars = window.data(peer, layout_.combine_scalars(parity, rank, slot));
  for (int k = 0; k < topk_; ++k) {
    const float scalar = scalar_of(own_, peer, token, k);
    std::memcpy(scalars + 4 * k, &scalar, 4);
  }
}

int32_t Combine::row_of(const OperandView& from, int token_rank, int token, int k) const {
  const int64_t slot = static_cast<int64_t>(token_rank) * args_.num_tokens + token;
  const int32_t row = from.recv_rows[slot * topk_ + k];
  return row >= 0 && row < from.num_rows ? row : -1;
}

bool Combine::has_rows(int token_rank, int token) const {
  for (int k = 0; k < topk_; ++k) {
    if (row_of(own_, token_rank, token, k) >= 0) return true;
  }
  return false;
}

void Combine::add_rows(const OperandView& from, int token_rank, int token, Terms* terms) const {
  if (from.by_slot) return add_slot(from, token_rank, token, terms);
  for (int k = 0; k < topk_; ++k) {
    const int32_t row = row_of(from, token_rank, token, k);
    if (row < 0) continue;
    const float weight = from.row_weights != nullptr ? from.row_weights[row] : 1.0f;
    const char* first = from.rows + row * shape_.row_bytes;
    prefetch_bytes(first, std::min(shape_.row_bytes, kPrefetchBytes));
    terms->add(first, weight);
  }
}

void Combine::add_slot(const OperandView& from, int token_rank, int token, Terms* terms) const {
  const int64_t slot = static_cast<int64_t>(token_rank) * args_.num_tokens + token;
  for (int k = 0; k < topk_; ++k) {
    if (row_of(from, token_rank, token, k) < 0) continue;
    return terms->add(from.rows + slot * shape_.row_bytes, 1.0f);
  }
}

float Combine::scalar_of(const OperandView& from, int token_rank, int token, int k) const {
  const int32_t row = row_of(from, token_rank, token, k);
  return row >= 0 ? from.row_scalars[row] : 0.0f;
}

float* Combine::scalars_of(int token) const {
  return args_.scalars != nullptr ? args_.scalars + static_cast<int64_t>(token) * topk_ : nullptr;
}

Owners Combine::owners_of(int token) const {
  Owners owners{{}, topk_};
  for (int k = 0; k < topk_; ++k) {
    const int32_t expert = args_.topk_idx[static_cast<int64_t>(token) * topk_ + k];
    const bool real = expert >= 0 && expert < shape_.num_experts;
    owners.rank[k] = real ? expert / experts_per_rank_ : -1;
  }
  return owners;
}

// The rows of a rank whose operands can be read: its partial sum is made here.
void Combine::take_rows(const OperandView& from, int source, int token, const Owners& owners,
                        Terms* terms) const {
  const int rank = session_.rank();
  terms->begin_part(source != rank);
  add_rows(from, rank, token, terms);
  if (args_.scalars == nullptr) return;
  for (int k = 0; k < topk_; ++k) {
    if (owners.rank[k] == source) scalars_of(token)[k] = scalar_of(from, rank, token, k);
  }
}

void Combine::take_partial_sum(int parity, int source, int token, int slot, const Owners& owners,
                               Terms* terms) const {
  const int rank = session_.rank();
  const Window& window = session_.window();
  terms->begin_part(false);
  terms->add(window.data(rank, layout_.combine_row(parity, source, slot)), 1.0f);
  if (args_.scalars == nullptr) return;
  const char* received = window.data(rank, layout_.combine_scalars(parity, source, slot));
  for (int k = 0; k < topk_; ++k) {
    if (owners.rank[k] == source) std::memcpy(&scalars_of(token)[k], received + 4 * k, 4);
  }
}

bool Combine::receive_chunk(uint64_t epoch, TokenRange tokens) {
  // One token is summed while the rows of the next are on their way to the cache.
  Terms terms[2];
  for (int token = tokens.begin; token < tokens.end; ++token) {
    if (!gather_terms(epoch, token, token - tokens.begin, &terms[token % 2])) return false;
    if (token > tokens.begin) sum_terms(terms[(token - 1) % 2], token - 1);
  }
  if (tokens.size() > 0) sum_terms(terms[(tokens.end - 1) % 2], tokens.end - 1);
  return true;
}

bool Combine::gather_terms(uint64_t epoch, int token, int slot, Terms* terms) {
  const int parity = parity_of(epoch);
  if (args_.scalars != nullptr) std::fill_n(scalars_of(token), topk_, 0.0f);
  const Owners owners = owners_of(token);
  terms->size = terms->num_parts = 0;
  // Our own rows first, then the other ranks' sums in the order of ranks.
  if (owners.name(session_.rank())) take_rows(own_, session_.rank(), token, owners, terms);
  for (int source = 0; source < session_.num_ranks(); ++source) {
    if (source == session_.rank() || !owners.name(source)) continue;
    Arrival arrival;
    const int64_t flag = layout_.combine_flag(parity, source, slot);
    if (!session_.wait_flag(source, flag, epoch, &arrival)) return false;
    if (arrival != Arrival::kArrived) continue;
    if (const OperandView* operands = context_.operands_of(source)) {
      take_rows(*operands, source, token, owners, terms);
    } else {
      take_partial_sum(parity, source, token, slot, owners, terms);
    }
  }
  return true;
}

void Combine::sum_terms(const Terms& terms, int token) const {
  char* out = args_.out + token * shape_.row_bytes;
  row_math().sum_parts(terms.part.data(), terms.num_parts, terms.term.data(), out, args_.hidden,
                       args_.row_type);
}

}  // namespace

bool run_combine(RankContext& context, const CombineArgs& args, const OpTag& tag,
                 uint64_t first_epoch) {
  return Combine(context, args, tag).run(first_epoch);
}

bool run_combine_start(RankContext& context, const CombineArgs& args, const OpTag& tag,
                       uint64_t epoch) {
  return Combine(context, args, tag).start(epoch);
}

bool run_combine_done(RankContext& context, const CombineArgs& args, const OpTag& tag,
                      uint64_t epoch) {
  return Combine(context, args, tag).done(epoch);
}

}  // namespace jax_ep
