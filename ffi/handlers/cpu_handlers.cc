#include "handlers/cpu_handlers.h"

#include <utility>

#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "cpu/notify.h"
#include "handlers/cpu_call.h"
#include "handlers/notify_operands.h"
#include "protocol/epochs.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

template <class Operands, class Args>
Operation make_operation(const CpuCall& call, const CpuBuffer& buffer, Channel channel,
                         const Operands& operands, const Args& args) {
  Operation operation;
  operation.operands = args.view();
  operation.tag = operands.tag(*call.site);
  operation.channel = channel;
  operation.num_epochs = num_epochs(operands.num_tokens(), buffer.options().tokens_per_epoch);
  return operation;
}

// What all ops do first: find the buffer, check the operands. A resolved call without an error can
// be started.
template <class Operands>
CpuResolved admit(const CpuCall& call, const Operands& operands, const ffi::AnyBuffer& rank) {
  CpuResolved resolved = resolve(call, *data<const int32_t>(rank));
  if (resolved.error.empty()) {
    const CpuBuffer& buffer = *resolved.buffer;
    resolved.error = operands.error(shape_of(buffer.layout().shape, buffer.options()));
  }
  return resolved;
}

Float8Rows float8_rows(const DispatchOperands& operands, const CpuBuffer& buffer) {
  return {operands.float8.format(), operands.row_type(), buffer.options().hidden,
          operands.float8.scales_data()};
}

DispatchArgs dispatch_args(const DispatchOperands& operands, const CpuBuffer& buffer) {
  return {data<const char>(operands.x),
          data<const int32_t>(operands.topk_idx),
          data<const float>(operands.topk_weights),
          data<char>(operands.tokens),
          data<float>(operands.weights),
          data<int32_t>(operands.group_sizes),
          data<int32_t>(operands.valid_sizes),
          data<int32_t>(operands.num_dropped),
          data<int32_t>(operands.clean_topk_idx),
          data<int32_t>(operands.recv_rows),
          operands.num_tokens(),
          operands.capacity(),
          operands.expert_alignment,
          operands.zero_tail,
          operands.expanded ? nullptr : data<int32_t>(operands.row_map),
          /*expert_rows=*/0,
          float8_rows(operands, buffer)};
}

template <class Operands>
ffi::Future start_dispatch(const CpuCall& call, const CpuResolved& resolved,
                           const Operands& operands, const DispatchArgs& args) {
  Operation operation = make_operation(call, *resolved.buffer, kDispatchChannel, operands, args);
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_dispatch(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

ffi::Future dispatch(const CpuCall& call, const DispatchOperands& operands) {
  const CpuResolved resolved = admit(call, operands, operands.rank);
  if (!resolved.error.empty()) return refuse(call, resolved);
  return start_dispatch(call, resolved, operands, dispatch_args(operands, *resolved.buffer));
}

ffi::Future dispatch_routed(const CpuCall& call, const RoutedDispatchOperands& operands) {
  const CpuResolved resolved = admit(call, operands, operands.base.rank);
  if (!resolved.error.empty()) return refuse(call, resolved);
  DispatchArgs args = dispatch_args(operands.base, *resolved.buffer);
  args.clean_topk_idx = nullptr;
  args.route = {data<const int32_t>(operands.row_index), data<const int32_t>(operands.counts)};
  return start_dispatch(call, resolved, operands, args);
}

ffi::Future notify(const CpuCall& call, const NotifyOperands& operands) {
  const CpuResolved resolved = admit(call, operands, operands.rank);
  if (!resolved.error.empty()) return refuse(call, resolved);
  const NotifyArgs args{
      data<const int32_t>(operands.topk_idx),
      data<int32_t>(operands.clean_topk_idx),
      data<int32_t>(operands.row_index),
      data<int32_t>(operands.counts),
      operands.num_tokens(),
      *data<const uint32_t>(operands.ticket),
      resolved.buffer->notices().counters(resolved.place.group, resolved.place.rank)};
  Operation operation = make_operation(call, *resolved.buffer, kDispatchChannel, operands, args);
  operation.num_epochs = 1;  // counts do not come in chunks
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t epoch) {
    return run_notify(context, args, tag, epoch);
  };
  return start(call, resolved, std::move(operation));
}

ffi::Future combine(const CpuCall& call, const CombineOperands& operands) {
  const CpuResolved resolved = admit(call, operands, operands.rank);
  if (!resolved.error.empty()) return refuse(call, resolved);
  const CombineArgs args{data<const char>(operands.y),
                         operands.weighted ? data<const float>(operands.row_weights) : nullptr,
                         operands.with_scalars ? data<const float>(operands.row_scalars) : nullptr,
                         data<const int32_t>(operands.topk_idx),
                         data<const int32_t>(operands.recv_rows),
                         data<char>(operands.out),
                         operands.with_scalars ? data<float>(operands.scalars) : nullptr,
                         operands.num_tokens(),
                         operands.capacity(),
                         operands.row_type(),
                         resolved.buffer->options().hidden,
                         operands.expanded};
  Operation operation = make_operation(call, *resolved.buffer, kCombineChannel, operands, args);
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_combine(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

ffi::Future combine_grad(const CpuCall& call, const CombineGradOperands& operands) {
  const CpuResolved resolved = admit(call, operands, operands.rank);
  if (!resolved.error.empty()) return refuse(call, resolved);
  const CombineGradArgs args{data<const char>(operands.g),
                             data<const int32_t>(operands.topk_idx),
                             data<const int32_t>(operands.recv_rows),
                             data<const float>(operands.row_weights),
                             data<const char>(operands.y),
                             data<char>(operands.d_y),
                             data<float>(operands.d_row_weights),
                             operands.num_tokens(),
                             operands.capacity(),
                             operands.expert_alignment,
                             operands.zero_tail,
                             operands.row_type(),
                             resolved.buffer->options().hidden};
  Operation operation = make_operation(call, *resolved.buffer, kDispatchChannel, operands, args);
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_combine_grad(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

constexpr auto decoded_dispatch = decode_dispatch<ffi::RunId, ffi::Future, dispatch>;
constexpr auto decoded_float8_dispatch = decode_float8_dispatch<ffi::RunId, ffi::Future, dispatch>;
constexpr auto decoded_dispatch_routed =
    decode_routed_dispatch<ffi::RunId, ffi::Future, dispatch_routed>;
constexpr auto decoded_dispatch_routed_float8 =
    decode_routed_float8_dispatch<ffi::RunId, ffi::Future, dispatch_routed>;
constexpr auto decoded_notify = decode_notify<ffi::RunId, ffi::Future, notify>;
constexpr auto decoded_combine = decode_combine<ffi::RunId, ffi::Future, combine>;
constexpr auto decoded_combine_grad = decode_combine_grad<ffi::RunId, ffi::Future, combine_grad>;

}  // namespace

}  // namespace jax_ep

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_instantiate, jax_ep::instantiate_site,
                              xla::ffi::Ffi::BindInstantiate().Attrs<xla::ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_cpu, jax_ep::decoded_dispatch,
                              jax_ep::bind_dispatch<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_float8_cpu, jax_ep::decoded_float8_dispatch,
                              jax_ep::bind_float8_dispatch<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_routed_cpu, jax_ep::decoded_dispatch_routed,
                              jax_ep::bind_routed_dispatch<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_routed_float8_cpu,
                              jax_ep::decoded_dispatch_routed_float8,
                              jax_ep::bind_routed_float8_dispatch<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_notify_cpu, jax_ep::decoded_notify,
                              jax_ep::bind_notify<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_cpu, jax_ep::decoded_combine,
                              jax_ep::bind_combine<xla::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_grad_cpu, jax_ep::decoded_combine_grad,
                              jax_ep::bind_combine_grad<xla::ffi::RunId>());
