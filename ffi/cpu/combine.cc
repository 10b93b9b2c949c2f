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

// The terms of one sum: rows of the own rank and one partial sum per named peer, at most K each.
struct Terms {
  std::array<RowTerm, 2 * kMaxExpertsPerTok> term;
  int size = 0;
  void add(const char* row, float weight) { term[size++] = {row, weight}; }
};

class Combine {
 public:
  Combine(RankContext& context, const CombineArgs& args, const OpTag& tag)
      : args_(args),
        session_(context, kCombineChannel, tag),
        layout_(context.window.layout),
        shape_(layout_.shape),
        topk_(shape_.num_experts_per_tok),
        experts_per_rank_(shape_.experts_per_rank()) {}

  bool run(uint64_t first_epoch);

 private:
  void send_chunk(uint64_t epoch, TokenRange tokens);
  void send_token(uint64_t epoch, int peer, int token, int slot);
  bool receive_chunk(uint64_t epoch, TokenRange tokens);
  bool receive_token(uint64_t epoch, int token, int slot);
  // Adds this rank's rows for token `token` of `source`, in k order.
  void add_rows(int source, int token, Terms* terms) const;
  void add_slot(int source, int token, Terms* terms) const;
  float scalar_of(int source, int token, int k) const;
  int32_t row_of(int source, int token, int k) const;
  bool names(int token, int k, int rank) const;

  const CombineArgs& args_;
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
  const int rank = session_.rank();
  const Window& window = session_.window();
  Terms terms;
  add_rows(peer, token, &terms);
  if (terms.size > 0) {
    char* to = window.data(peer, layout_.combine_row(parity, rank, slot));
    row_math().sum(terms.term.data(), terms.size, to, args_.hidden, args_.row_type);
    if (args_.row_scalars != nullptr) {
      char* scalars = window.data(peer, layout_.combine_scalars(parity, rank, slot));
      for (int k = 0; k < topk_; ++k) {
        const float scalar = scalar_of(peer, token, k);
        std::memcpy(scalars + 4 * k, &scalar, 4);
      }
    }
  }
  session_.send_flag(peer, layout_.combine_flag(parity, rank, slot), epoch, terms.size > 0);
}

int32_t Combine::row_of(int source, int token, int k) const {
  const int64_t slot = static_cast<int64_t>(source) * args_.num_tokens + token;
  const int32_t row = args_.recv_rows[slot * topk_ + k];
  return row >= 0 && row < args_.capacity ? row : -1;
}

void Combine::add_rows(int source, int token, Terms* terms) const {
  if (!args_.expanded) return add_slot(source, token, terms);
  for (int k = 0; k < topk_; ++k) {
    const int32_t row = row_of(source, token, k);
    if (row < 0) continue;
    const float weight = args_.row_weights != nullptr ? args_.row_weights[row] : 1.0f;
    terms->add(args_.y + row * shape_.row_bytes, weight);
  }
}

void Combine::add_slot(int source, int token, Terms* terms) const {
  const int64_t slot = static_cast<int64_t>(source) * args_.num_tokens + token;
  for (int k = 0; k < topk_; ++k) {
    if (row_of(source, token, k) < 0) continue;
    return terms->add(args_.y + slot * shape_.row_bytes, 1.0f);
  }
}

float Combine::scalar_of(int source, int token, int k) const {
  const int32_t row = row_of(source, token, k);
  return row >= 0 ? args_.row_scalars[row] : 0.0f;
}

bool Combine::names(int token, int k, int rank) const {
  const int32_t expert = args_.topk_idx[static_cast<int64_t>(token) * topk_ + k];
  return expert >= 0 && expert < shape_.num_experts && expert / experts_per_rank_ == rank;
}

bool Combine::receive_chunk(uint64_t epoch, TokenRange tokens) {
  for (int token = tokens.begin; token < tokens.end; ++token) {
    if (!receive_token(epoch, token, token - tokens.begin)) return false;
  }
  return true;
}

bool Combine::receive_token(uint64_t epoch, int token, int slot) {
  const int parity = parity_of(epoch);
  const int rank = session_.rank();
  const Window& window = session_.window();
  float* scalars =
      args_.scalars != nullptr ? args_.scalars + static_cast<int64_t>(token) * topk_ : nullptr;
  if (scalars != nullptr) std::fill_n(scalars, topk_, 0.0f);
  Terms terms;
  for (int source = 0; source < session_.num_ranks(); ++source) {
    bool named = false;
    for (int k = 0; k < topk_ && !named; ++k) named = names(token, k, source);
    if (!named) continue;
    if (source == rank) {
      add_rows(rank, token, &terms);
      for (int k = 0; scalars != nullptr && k < topk_; ++k) {
        if (names(token, k, rank)) scalars[k] = scalar_of(rank, token, k);
      }
      continue;
    }
    Arrival arrival;
    const int64_t flag = layout_.combine_flag(parity, source, slot);
    if (!session_.wait_flag(source, flag, epoch, &arrival)) return false;
    if (arrival != Arrival::kArrived) continue;
    terms.add(window.data(rank, layout_.combine_row(parity, source, slot)), 1.0f);
    if (scalars == nullptr) continue;
    const char* received = window.data(rank, layout_.combine_scalars(parity, source, slot));
    for (int k = 0; k < topk_; ++k) {
      if (names(token, k, source)) std::memcpy(&scalars[k], received + 4 * k, 4);
    }
  }
  char* out = args_.out + token * shape_.row_bytes;
  row_math().sum(terms.term.data(), terms.size, out, args_.hidden, args_.row_type);
  return true;
}

}  // namespace

bool run_combine(RankContext& context, const CombineArgs& args, const OpTag& tag,
                 uint64_t first_epoch) {
  return Combine(context, args, tag).run(first_epoch);
}

}  // namespace jax_ep
