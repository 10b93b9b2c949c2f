#include "cpu/combine_grad.h"

#include <algorithm>
#include <cstring>

#include "cpu/row_math.h"
#include "cpu/session.h"
#include "protocol/epochs.h"

namespace jax_ep {

namespace {

constexpr int kTokensPerRing = 64;

class CombineGrad {
 public:
  CombineGrad(RankContext& context, const CombineGradArgs& args, const OpTag& tag)
      : context_(context),
        args_(args),
        session_(context, kDispatchChannel, tag),
        layout_(context.window.layout),
        shape_(layout_.shape),
        topk_(shape_.num_experts_per_tok) {}

  bool run(uint64_t first_epoch);

 private:
  void send_chunk(uint64_t epoch, TokenRange tokens);
  void expand_own();
  bool receive_chunk(uint64_t epoch, TokenRange tokens);
  bool has_rows(int source, int token) const;
  void expand(const char* row, int source, int token);
  void zero_uncovered();

  RankContext& context_;
  const CombineGradArgs& args_;
  Session session_;
  const WindowLayout& layout_;
  const WindowShape& shape_;
  int topk_;
};

bool CombineGrad::run(uint64_t first_epoch) {
  const int num_chunks = num_epochs(args_.num_tokens, shape_.tokens_per_epoch);
  context_.covered.assign(args_.capacity, 0);
  for (int chunk = 0; chunk <= num_chunks; ++chunk) {
    const uint64_t epoch = first_epoch + chunk;
    if (chunk < num_chunks) {
      if (!session_.wait_credits(epoch)) return false;
      session_.send_tags(epoch);
      session_.ring_all();
      send_chunk(epoch, chunk_tokens(args_.num_tokens, shape_.tokens_per_epoch, chunk));
    }
    if (chunk == 0) {
      expand_own();
    } else {
      const TokenRange tokens = chunk_tokens(args_.num_tokens, shape_.tokens_per_epoch, chunk - 1);
      if (!session_.check_tags(epoch - 1) || !receive_chunk(epoch - 1, tokens)) return false;
      session_.send_credits(epoch - 1);
    }
  }
  zero_uncovered();
  return true;
}

void CombineGrad::send_chunk(uint64_t epoch, TokenRange tokens) {
  const int parity = parity_of(epoch);
  const int rank = session_.rank();
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const int slot = token - tokens.begin;
    const int32_t* experts = args_.topk_idx + static_cast<int64_t>(token) * topk_;
    session_.jitter();
    for (int step = 0; step < session_.num_peers(); ++step) {
      const int peer = session_.peer(step);
      const bool needed = std::any_of(experts, experts + topk_, [&](int32_t expert) {
        return expert >= 0 && expert / shape_.experts_per_rank() == peer;
      });
      if (needed && context_.operands_of(peer) == nullptr) {
        std::memcpy(session_.window().data(peer, layout_.dispatch_message(parity, rank, slot)),
                    args_.g + token * shape_.row_bytes, shape_.row_bytes);
      }
      session_.send_flag(peer, layout_.dispatch_flag(parity, rank, slot), epoch, needed);
    }
    if (slot % kTokensPerRing == kTokensPerRing - 1) session_.ring_all();
  }
  session_.ring_all();
}

void CombineGrad::expand_own() {
  for (int token = 0; token < args_.num_tokens; ++token) {
    expand(args_.g + token * shape_.row_bytes, session_.rank(), token);
  }
}

bool CombineGrad::receive_chunk(uint64_t epoch, TokenRange tokens) {
  const int parity = parity_of(epoch);
  for (int step = 0; step < session_.num_peers(); ++step) {
    const int source = session_.peer(step);
    for (int token = tokens.begin; token < tokens.end; ++token) {
      const int slot = token - tokens.begin;
      if (!has_rows(source, token)) continue;
      Arrival arrival;
      const int64_t flag = layout_.dispatch_flag(parity, source, slot);
      if (!session_.wait_flag(source, flag, epoch, &arrival)) return false;
      if (arrival != Arrival::kArrived) continue;
      const OperandView* operands = context_.operands_of(source);
      const int64_t message = layout_.dispatch_message(parity, source, slot);
      expand(operands != nullptr ? operands->rows + token * shape_.row_bytes
                                 : session_.window().data(session_.rank(), message),
             source, token);
    }
  }
  return true;
}

bool CombineGrad::has_rows(int source, int token) const {
  const int32_t* rows =
      args_.recv_rows + (static_cast<int64_t>(source) * args_.num_tokens + token) * topk_;
  return std::any_of(rows, rows + topk_,
                     [&](int32_t row) { return row >= 0 && row < args_.capacity; });
}

void CombineGrad::expand(const char* row, int source, int token) {
  const int32_t* rows =
      args_.recv_rows + (static_cast<int64_t>(source) * args_.num_tokens + token) * topk_;
  for (int k = 0; k < topk_; ++k) {
    const int64_t to = rows[k];
    if (to < 0 || to >= args_.capacity) continue;
    const int64_t offset = to * shape_.row_bytes;
    row_math().scale(row, args_.row_weights[to], args_.d_y + offset, args_.hidden, args_.row_type);
    args_.d_row_weights[to] = row_math().dot(args_.y + offset, row, args_.hidden, args_.row_type);
    context_.covered[to] = 1;
  }
}

void CombineGrad::zero_uncovered() {
  int64_t end = 0;  // of the last group: rows beyond it are the tail
  for (int64_t row = 0; row < args_.capacity; ++row) {
    if (context_.covered[row]) end = row + 1;
  }
  end = std::min(align_up(end, args_.expert_alignment), args_.capacity);
  for (int64_t row = 0; row < args_.capacity; ++row) {
    if (context_.covered[row]) continue;
    args_.d_row_weights[row] = 0.0f;
    if (row < end || args_.zero_tail) {
      std::memset(args_.d_y + row * shape_.row_bytes, 0, shape_.row_bytes);
    }
  }
}

}  // namespace

bool run_combine_grad(RankContext& context, const CombineGradArgs& args, const OpTag& tag,
                      uint64_t first_epoch) {
  return CombineGrad(context, args, tag).run(first_epoch);
}

}  // namespace jax_ep
