// Low-latency operations on a World: their own outputs, and how they are launched.
#pragma once

#include "cuda/ll_combine.h"
#include "cuda/ll_combine_grad.h"
#include "cuda/ll_dispatch.h"
#include "cuda_checks.h"
#include "protocol/quantize.h"

namespace jax_ep::gpu::test {

struct LlMode {
  LlOutput output = LlOutput::kRows;
  bool padded = true;
  bool power_of_two = false;
  bool small_shared = false;  // as if masks and bases had no room in shared memory
};

constexpr uint32_t kWaitedBefore = 1000;  // nanoseconds

// What a dispatch writes, beside what RankData holds. Two operations can be in flight.
struct LlOutputs {
  Array<char> tokens;
  Array<float> scales, weights;
  Array<int32_t> group_sizes, valid_sizes, num_dropped, sanitised, recv_rows, expert_tokens;
  Array<uint32_t> waited, dispatch_ticket, combine_ticket;
  Array<float> order_token;
  Array<char> out;
  Array<float> scalars;
};

struct LlRank {
  Array<int32_t> expert_tokens_before;
  Array<uint32_t> waited_before;
  LlOutputs slot[2];
};

inline Case ll_case(const char* name, int num_ranks, std::vector<int> devices, int num_tokens,
                    int hidden, int num_experts_per_tok, int num_experts,
                    RowType type = RowType::kBFloat16, Routing routing = Routing::kUniform) {
  Case c{name, num_ranks, std::move(devices), num_tokens, hidden, num_experts_per_tok, num_experts};
  c.type = type;
  c.routing = routing;
  c.low_latency = true;
  return c;
}

class LlWorld {
 public:
  LlWorld(const Case& c, const LlMode& mode, uint64_t seed, double timeout_s)
      : world_(c, seed, timeout_s), mode_(mode), ranks_(c.num_ranks) {}

  World& world() { return world_; }
  const LlMode& mode() const { return mode_; }
  void set_mode(const LlMode& mode) { mode_ = mode; }
  LlRank& rank(int r) { return ranks_[r]; }
  int64_t padded_capacity() const {
    return int64_t{world_.num_ranks()} * world_.c().num_tokens * world_.experts_per_rank();
  }
  int64_t output_row_bytes() const {
    return mode_.output == LlOutput::kValues ? world_.c().hidden : world_.row_bytes();
  }

  // Sizes all outputs, and overwrites them.
  void poison() {
    world_.synchronise();
    const Case& c = world_.c();
    for (int r = 0; r < c.num_ranks; ++r) {
      world_.use(r);
      LlRank& rank = ranks_[r];
      std::vector<int32_t> tokens(world_.experts_per_rank());
      for (int32_t& count : tokens) count = static_cast<int32_t>(world_.random()() % 1000);
      rank.expert_tokens_before.put(tokens);
      rank.waited_before.put(std::vector<uint32_t>(c.num_ranks, kWaitedBefore));
      for (LlOutputs& o : rank.slot) {
        o.tokens.resize(world_.capacity() * output_row_bytes());
        o.scales.resize(world_.capacity() * num_scales(c.hidden));
        o.weights.resize(world_.capacity());
        for (Array<int32_t>* sizes : {&o.group_sizes, &o.valid_sizes, &o.expert_tokens}) {
          sizes->resize(world_.experts_per_rank());
        }
        o.num_dropped.resize(1);
        o.sanitised.resize(world_.entries());
        o.recv_rows.resize(world_.entries() * c.num_ranks);
        o.waited.resize(c.num_ranks);
        o.dispatch_ticket.resize(2);
        o.combine_ticket.resize(2);
        o.order_token.resize(1);
        o.out.resize(c.num_tokens * world_.row_bytes());
        o.scalars.resize(world_.entries());
        poison(o);
      }
      rank_data(r).d_y.poison();
      rank_data(r).d_row_weights.poison();
    }
    world_.synchronise();
  }

  // `rows`: what is dispatched.
  void dispatch(int r, LlTurn turn, int slot, const Array<char>& rows) {
    world_.use(r);
    RankData& d = rank_data(r);
    LlOutputs& o = ranks_[r].slot[slot];
    LlDispatchParams p{};
    p.op = world_.operation(r, OpKind::kDispatch, kDispatchChannel, site_);
    p.plan = dispatch_plan(r, turn);
    p.turn = turn;
    p.turn.order_token = o.order_token.get();
    p.x = rows.get();
    p.topk_idx = d.topk.get();
    p.topk_weights = d.topk_weights.get();
    p.tokens = o.tokens.get();
    p.scales = o.scales.get();
    p.weights = o.weights.get();
    p.group_sizes = o.group_sizes.get();
    p.valid_sizes = o.valid_sizes.get();
    p.num_dropped = o.num_dropped.get();
    p.sanitised_idx = o.sanitised.get();
    p.recv_rows = o.recv_rows.get();
    if (with_statistics_) {
      p.expert_tokens_before = ranks_[r].expert_tokens_before.get();
      p.expert_tokens = o.expert_tokens.get();
      p.waited_ns_before = ranks_[r].waited_before.get();
      p.waited_ns = o.waited.get();
    }
    p.capacity = world_.capacity();
    p.padded = mode_.padded;
    p.zero_tail = world_.c().zero_tail && !mode_.padded;
    p.output = mode_.output;
    p.power_of_two_scales = mode_.power_of_two;
    p.row_type = world_.c().type;
    check(launch_ll_dispatch(p, d.stream), "launch low-latency dispatch");
  }

  // Along the handle that slot 0 holds.
  void combine(int r, LlTurn turn, int slot, bool weighted, bool with_scalars) {
    world_.use(r);
    RankData& d = rank_data(r);
    LlOutputs& o = ranks_[r].slot[slot];
    LlOutputs& handle = ranks_[r].slot[0];
    LlCombineParams p{};
    p.op = world_.operation(r, OpKind::kCombine, kCombineChannel, site_);
    p.plan = plan_ll_combine(world_.layout().shape, world_.c().num_tokens, world_.num_sms(r),
                             world_.limits(r));
    p.turn = turn;
    p.turn.order_token = o.order_token.get();
    p.y = d.y.get();
    p.row_weights = weighted ? handle.weights.get() : nullptr;
    p.row_scalars = with_scalars ? d.row_scalars.get() : nullptr;
    p.topk_idx = handle.sanitised.get();
    p.recv_rows = handle.recv_rows.get();
    p.out = o.out.get();
    p.scalars = with_scalars ? o.scalars.get() : nullptr;
    p.capacity = world_.capacity();
    p.row_type = world_.c().type;
    check(launch_ll_combine(p, d.stream), "launch low-latency combine");
  }

  void combine_grad(int r) {
    world_.use(r);
    RankData& d = rank_data(r);
    LlOutputs& handle = ranks_[r].slot[0];
    LlCombineGradParams params{};
    params.turn = LlTurn::fused();
    params.turn.order_token = handle.order_token.get();
    params.num_blocks = plan_ll_combine_grad(world_.c().num_tokens, world_.num_sms(r));
    CombineGradParams& p = params.grad;
    p.op = world_.operation(r, OpKind::kCombineGrad, kDispatchChannel, site_);
    p.g = d.g.get();
    p.topk_idx = handle.sanitised.get();
    p.recv_rows = handle.recv_rows.get();
    p.row_weights = handle.weights.get();
    p.y = d.y.get();
    p.d_y = d.d_y.get();
    p.d_row_weights = d.d_row_weights.get();
    p.capacity = world_.capacity();
    p.expert_alignment = 1;
    p.zero_tail = true;
    p.row_type = world_.c().type;
    check(launch_ll_combine_grad(params, d.stream), "launch low-latency combine_grad");
  }

  LlTurn start_dispatch(int r, int slot) {
    return LlTurn::start(ranks_[r].slot[slot].dispatch_ticket.get());
  }
  LlTurn done_dispatch(int r, int slot) {
    return LlTurn::done(ranks_[r].slot[slot].dispatch_ticket.get());
  }
  LlTurn start_combine(int r, int slot) {
    return LlTurn::start(ranks_[r].slot[slot].combine_ticket.get());
  }
  LlTurn done_combine(int r, int slot) {
    return LlTurn::done(ranks_[r].slot[slot].combine_ticket.get());
  }

  RankData& rank_data(int r) { return world_.rank(r); }
  void set_site(uint64_t site) { site_ = site; }
  void set_statistics(bool wanted) { with_statistics_ = wanted; }

 private:
  LlDispatchPlan dispatch_plan(int r, const LlTurn& turn) const {
    DeviceLimits limits = world_.limits(r);
    const WindowShape& shape = world_.layout().shape;
    LlDispatchPlan plan = plan_ll_dispatch(shape, turn, world_.c().num_tokens, mode_.output,
                                           world_.c().type, world_.num_sms(r), limits);
    if (mode_.small_shared) plan.masks_offset = plan.bases_offset = -1;
    return plan;
  }
  static void poison(LlOutputs& o) {
    for (Array<char>* bytes : {&o.tokens, &o.out}) bytes->poison();
    for (Array<float>* row : {&o.scales, &o.weights, &o.scalars}) row->poison();
    for (Array<int32_t>* row : {&o.group_sizes, &o.valid_sizes, &o.num_dropped, &o.sanitised,
                                &o.recv_rows, &o.expert_tokens}) {
      row->poison();
    }
    for (Array<uint32_t>* words : {&o.waited, &o.dispatch_ticket, &o.combine_ticket}) {
      words->poison();
    }
    o.order_token.poison();
  }

  World world_;
  LlMode mode_;
  std::vector<LlRank> ranks_;
  uint64_t site_ = 0;
  bool with_statistics_ = true;
};

}  // namespace jax_ep::gpu::test
