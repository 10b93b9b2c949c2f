#include "handlers/cpu_low_latency.h"

#include <cstring>
#include <optional>
#include <utility>

#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "handlers/cpu_call.h"
#include "handlers/low_latency_operands.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;

// What all low-latency operations have in common: one epoch, halves, a token without content.
template <class Operands>
Operation make_operation(const CpuCall& call, const Operands& operands, Channel channel) {
  *data<float>(operands.token.out) = 0.0f;
  Operation operation;
  operation.tag = operands.tag(*call.site);
  operation.channel = channel;
  operation.num_epochs = 1;
  return operation;
}

// Args: the operation's. Peers may read what a whole operation sends; a half they outlive.
template <class Operands, class Args>
Operation make_half(const CpuCall& call, const Operands& operands, Channel channel,
                    const Args& args) {
  Operation operation = make_operation(call, operands, channel);
  operation.half = operands.half;
  if (operands.half == Half::kWhole) operation.operands = args.view();
  if (operands.half == Half::kStart) operation.ticket_out = data<void>(*operands.ticket);
  if (operands.half == Half::kDone) {
    std::memcpy(&operation.ticket, data<const void>(*operands.ticket), sizeof(StartTicket));
  }
  return operation;
}

// Adds one operation to a program's statistics.
struct StatsArgs {
  const int32_t* tokens_per_expert;  // [E_l]
  const uint32_t* waited_ns;         // [R]
  int32_t* tokens_per_expert_out;
  uint32_t* waited_ns_out;
  const int32_t* counts;  // [E_l], of this operation

  // Modulo 2^32, in arithmetic that may wrap.
  void add(const RankContext& context) const {
    const int num_experts = context.window.layout.shape.experts_per_rank();
    for (int expert = 0; expert < num_experts; ++expert) {
      const auto before = static_cast<uint32_t>(tokens_per_expert[expert]);
      tokens_per_expert_out[expert] =
          static_cast<int32_t>(before + static_cast<uint32_t>(counts[expert]));
    }
    for (int peer = 0; peer < context.window.num_ranks; ++peer) {
      waited_ns_out[peer] = waited_ns[peer] + static_cast<uint32_t>(context.waited_ns[peer]);
    }
  }
};

std::optional<StatsArgs> stats_of(const LowLatencyDispatchOperands& operands) {
  if (!operands.with_stats()) return std::nullopt;
  const LowLatencyStats& stats = *operands.stats;
  return StatsArgs{data<const int32_t>(stats.tokens_per_expert),
                   data<const uint32_t>(stats.waited_ns),
                   data<int32_t>(stats.tokens_per_expert_out), data<uint32_t>(stats.waited_ns_out),
                   data<const int32_t>(operands.received->counts)};
}

DispatchArgs dispatch_args(const CpuBuffer& buffer, const LowLatencyDispatchOperands& operands) {
  DispatchArgs args{};
  args.x = data<const char>(operands.x);
  args.topk_idx = data<const int32_t>(operands.topk_idx);
  args.topk_weights = data<const float>(operands.topk_weights);
  args.num_tokens = operands.num_tokens();
  args.capacity = operands.num_rows();
  args.expert_alignment = 1;
  args.zero_tail = false;
  if (operands.clean_topk_idx) args.clean_topk_idx = data<int32_t>(*operands.clean_topk_idx);
  if (operands.received) {
    args.tokens = data<char>(operands.received->tokens);
    args.weights = data<float>(operands.received->weights);
    args.group_sizes = args.valid_sizes = data<int32_t>(operands.received->counts);
    args.num_dropped = data<int32_t>(operands.received->num_dropped);
    args.recv_rows = data<int32_t>(operands.received->recv_rows);
  }
  args.float8 = {operands.float8.format(), *row_type_of(operands.x.element_type()),
                 buffer.options().hidden, operands.float8.scales_data()};
  if (operands.padded) args.expert_rows = int64_t{buffer.num_ranks()} * operands.num_tokens();
  return args;
}

Operation dispatch(const CpuCall& call, const CpuBuffer& buffer,
                   const LowLatencyDispatchOperands& operands) {
  const DispatchArgs args = dispatch_args(buffer, operands);
  Operation operation = make_half(call, operands, kDispatchChannel, args);
  if (operands.half == Half::kStart) {
    operation.run = [args](RankContext& context, const OpTag& tag, uint64_t epoch) {
      return run_dispatch_start(context, args, tag, epoch);
    };
    return operation;
  }
  const bool done = operands.half == Half::kDone;
  if (!done) {
    operation.send = [args](RankContext& context, const OpTag& tag, uint64_t epoch) {
      context.waited_ns.clear();
      return run_dispatch_start(context, args, tag, epoch);
    };
  }
  operation.run = [args = args, done, stats = stats_of(operands)](
                      RankContext& context, const OpTag& tag, uint64_t epoch) mutable {
    context.waited_ns.assign(stats ? context.window.num_ranks : 0, 0);
    if (done) {
      const int64_t topk = context.window.layout.shape.num_experts_per_tok;
      context.experts.resize(args.num_tokens * topk);
      args.clean_topk_idx = context.experts.data();
    }
    const auto run = done ? run_dispatch_done : run_dispatch_receive;
    if (!run(context, args, tag, epoch)) return false;
    if (stats) stats->add(context);
    return true;
  };
  return operation;
}

Operation combine(const CpuCall& call, const CpuBuffer& buffer,
                  const LowLatencyCombineOperands& operands) {
  const CombineArgs args{data<const char>(operands.y),
                         operands.weighted ? data<const float>(operands.row_weights) : nullptr,
                         operands.with_scalars ? data<const float>(*operands.row_scalars) : nullptr,
                         data<const int32_t>(operands.topk_idx),
                         data<const int32_t>(operands.recv_rows),
                         operands.out ? data<char>(*operands.out) : nullptr,
                         operands.with_scalars ? data<float>(*operands.scalars) : nullptr,
                         operands.num_tokens(),
                         operands.num_rows(),
                         operands.row_type(),
                         buffer.options().hidden};
  Operation operation = make_half(call, operands, kCombineChannel, args);
  if (operands.half == Half::kWhole) {
    operation.send = [args](RankContext& context, const OpTag& tag, uint64_t epoch) {
      return run_combine_start(context, args, tag, epoch);
    };
  }
  const auto run = operands.half == Half::kStart ? run_combine_start : run_combine_done;
  operation.run = [args, run](RankContext& context, const OpTag& tag, uint64_t epoch) {
    return run(context, args, tag, epoch);
  };
  return operation;
}

Operation combine_grad(const CpuCall& call, const CpuBuffer& buffer,
                       const LowLatencyCombineGradOperands& operands) {
  Operation operation = make_operation(call, operands, kDispatchChannel);
  const CombineGradOperands& base = operands.base;
  const CombineGradArgs args{data<const char>(base.g),
                             data<const int32_t>(base.topk_idx),
                             data<const int32_t>(base.recv_rows),
                             data<const float>(base.row_weights),
                             data<const char>(base.y),
                             data<char>(base.d_y),
                             data<float>(base.d_row_weights),
                             base.num_tokens(),
                             base.capacity(),
                             base.expert_alignment,
                             base.zero_tail,
                             base.row_type(),
                             buffer.options().hidden};
  operation.operands = args.view();
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t epoch) {
    return run_combine_grad(context, args, tag, epoch);
  };
  return operation;
}

const AnyBuffer& rank_of(const LowLatencyDispatchOperands& operands) { return operands.rank; }
const AnyBuffer& rank_of(const LowLatencyCombineOperands& operands) { return operands.rank; }
const AnyBuffer& rank_of(const LowLatencyCombineGradOperands& operands) {
  return operands.base.rank;
}

ffi::Future refuse_arity() {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(to_error(wrong_arity_text()));
  return future;
}

// A handler: reads the operands of a target, finds the buffer, checks, and presents the operation.
template <class Operands, Half half,
          Operation (*make)(const CpuCall&, const CpuBuffer&, const Operands&)>
ffi::Future handle(Site* site, ffi::RunId run_id, int32_t ordinal, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const FlatCall flat(args, rets, attributes);
  const auto operands = Operands::read(flat, half);
  if (!operands) return refuse_arity();
  const CpuCall call{
      site, run_id, ordinal, {flat.attribute("buffer_id"), flat.attribute("fingerprint")}};
  CpuResolved resolved = resolve(call, *data<const int32_t>(rank_of(*operands)));
  if (resolved.error.empty()) {
    const CpuBuffer& buffer = *resolved.buffer;
    resolved.error = operands->error(shape_of(buffer.layout().shape, buffer.options()));
  }
  if (!resolved.error.empty()) return refuse(call, resolved);
  return start(call, resolved, make(call, *resolved.buffer, *operands));
}

template <Half half>
constexpr auto handle_dispatch = handle<LowLatencyDispatchOperands, half, dispatch>;
template <Half half>
constexpr auto handle_combine = handle<LowLatencyCombineOperands, half, combine>;
constexpr auto handle_combine_grad =
    handle<LowLatencyCombineGradOperands, Half::kWhole, combine_grad>;

auto bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Site>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<ffi::Dictionary>();
}

}  // namespace

}  // namespace jax_ep

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_cpu, jax_ep::handle_dispatch<jax_ep::Half::kWhole>,
                              jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_start_cpu,
                              jax_ep::handle_dispatch<jax_ep::Half::kStart>, jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_dispatch_done_cpu,
                              jax_ep::handle_dispatch<jax_ep::Half::kDone>, jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_cpu, jax_ep::handle_combine<jax_ep::Half::kWhole>,
                              jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_start_cpu,
                              jax_ep::handle_combine<jax_ep::Half::kStart>, jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_done_cpu,
                              jax_ep::handle_combine<jax_ep::Half::kDone>, jax_ep::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_ll_combine_grad_cpu, jax_ep::handle_combine_grad,
                              jax_ep::bind());
