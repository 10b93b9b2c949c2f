#include "handlers/cpu_handlers.h"

#include <utility>

#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "handlers/call.h"
#include "handlers/shapes.h"
#include "protocol/epochs.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Out = ffi::Result<ffi::AnyBuffer>;

Call make_call(Site* site, ffi::RunId run, int32_t ordinal, int64_t buffer_id, int64_t fingerprint,
               const AnyBuffer& rank) {
  const auto* axis_index = static_cast<const int32_t*>(rank.untyped_data());
  return {site, run.run_id, ordinal, {buffer_id, fingerprint}, *axis_index};
}

// Sizes that operands of one op share; zero where the operand has another rank.
struct Sizes {
  int64_t num_tokens;
  int64_t hidden;
  int64_t capacity;
};

int64_t dim(const AnyBuffer& buffer, size_t axis) {
  const auto dims = buffer.dimensions();
  return axis < dims.size() ? dims[axis] : 0;
}

template <typename T>
T* data(const AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}
template <typename T>
T* data(Out& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

void expect_sizes(ShapeCheck& check, const CpuBuffer& buffer, const Sizes& sizes, DataType type) {
  const CpuBufferOptions& options = buffer.options();
  const auto row_type = row_type_of(type);
  check.expect_true("rows of float32, bfloat16 or float16", row_type.has_value());
  check.expect_true("the buffer's hidden size", sizes.hidden == options.hidden);
  check.expect_true("the buffer's row type",
                    row_type && row_type_bytes(*row_type) == options.itemsize);
  check.expect_true("at most max_tokens_per_rank tokens",
                    sizes.num_tokens <= options.max_tokens_per_rank);
}

Operation make_operation(OpKind op, Channel channel, const CpuBuffer& buffer, int64_t num_tokens,
                         uint32_t variant) {
  Operation operation;
  operation.tag = {op, static_cast<uint32_t>(num_tokens), variant, 0};
  operation.channel = channel;
  operation.num_epochs =
      num_epochs(static_cast<int>(num_tokens), buffer.options().tokens_per_epoch);
  return operation;
}

ffi::Future dispatch(Site* site, ffi::RunId run, int32_t ordinal, int64_t buffer_id,
                     int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                     AnyBuffer rank, AnyBuffer x, AnyBuffer topk_idx, AnyBuffer topk_weights,
                     Out tokens, Out weights, Out group_sizes, Out valid_sizes, Out num_dropped,
                     Out clean_topk_idx, Out recv_rows) {
  const Call call = make_call(site, run, ordinal, buffer_id, fingerprint, rank);
  const Resolved resolved = resolve(call);
  if (!resolved.error.empty()) return refuse(call, resolved, resolved.error);
  const CpuBuffer& buffer = *resolved.buffer;
  const WindowShape& shape = buffer.layout().shape;
  const DataType type = x.element_type();
  const Sizes sizes{dim(x, 0), dim(x, 1), dim(*tokens, 0)};
  const int64_t topk = shape.num_experts_per_tok;
  const int64_t slots = shape.num_ranks * sizes.num_tokens;
  ShapeCheck check("dispatch");
  expect_sizes(check, buffer, sizes, type);
  check.expect("topk_idx", topk_idx, DataType::S32, {sizes.num_tokens, topk});
  check.expect("topk_weights", topk_weights, DataType::F32, {sizes.num_tokens, topk});
  check.expect("tokens", *tokens, type, {sizes.capacity, sizes.hidden});
  check.expect("weights", *weights, DataType::F32, {sizes.capacity});
  check.expect("group_sizes", *group_sizes, DataType::S32, {shape.experts_per_rank()});
  check.expect("valid_sizes", *valid_sizes, DataType::S32, {shape.experts_per_rank()});
  check.expect("num_dropped", *num_dropped, DataType::S32, {});
  check.expect("clean topk_idx", *clean_topk_idx, DataType::S32, {sizes.num_tokens, topk});
  check.expect("recv_rows", *recv_rows, DataType::S32, {slots, topk});
  check.expect_true("a positive expert_alignment", expert_alignment > 0);
  if (!check.error().empty()) return refuse(call, resolved, check.error());

  const DispatchArgs args{data<const char>(x),
                          data<const int32_t>(topk_idx),
                          data<const float>(topk_weights),
                          data<char>(tokens),
                          data<float>(weights),
                          data<int32_t>(group_sizes),
                          data<int32_t>(valid_sizes),
                          data<int32_t>(num_dropped),
                          data<int32_t>(clean_topk_idx),
                          data<int32_t>(recv_rows),
                          static_cast<int>(sizes.num_tokens),
                          sizes.capacity,
                          expert_alignment,
                          zero_tail != 0};
  Operation operation = make_operation(OpKind::kDispatch, kDispatchChannel, buffer,
                                       sizes.num_tokens, static_cast<uint32_t>(type));
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_dispatch(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

ffi::Future combine(Site* site, ffi::RunId run, int32_t ordinal, int64_t buffer_id,
                    int64_t fingerprint, int64_t weighted, int64_t with_scalars, AnyBuffer rank,
                    AnyBuffer y, AnyBuffer row_weights, AnyBuffer row_scalars, AnyBuffer topk_idx,
                    AnyBuffer recv_rows, Out out, Out scalars) {
  const Call call = make_call(site, run, ordinal, buffer_id, fingerprint, rank);
  const Resolved resolved = resolve(call);
  if (!resolved.error.empty()) return refuse(call, resolved, resolved.error);
  const CpuBuffer& buffer = *resolved.buffer;
  const WindowShape& shape = buffer.layout().shape;
  const DataType type = y.element_type();
  const Sizes sizes{dim(topk_idx, 0), dim(y, 1), dim(y, 0)};
  const int64_t topk = shape.num_experts_per_tok;
  ShapeCheck check("combine");
  expect_sizes(check, buffer, sizes, type);
  check.expect("y", y, type, {sizes.capacity, sizes.hidden});
  check.expect("topk_idx", topk_idx, DataType::S32, {sizes.num_tokens, topk});
  check.expect("recv_rows", recv_rows, DataType::S32, {shape.num_ranks * sizes.num_tokens, topk});
  check.expect("row_weights", row_weights, DataType::F32, {weighted ? sizes.capacity : 0});
  check.expect("row_scalars", row_scalars, DataType::F32, {with_scalars ? sizes.capacity : 0});
  check.expect("out", *out, type, {sizes.num_tokens, sizes.hidden});
  if (with_scalars) check.expect("scalars", *scalars, DataType::F32, {sizes.num_tokens, topk});
  if (!check.error().empty()) return refuse(call, resolved, check.error());

  const CombineArgs args{data<const char>(y),
                         weighted ? data<const float>(row_weights) : nullptr,
                         with_scalars ? data<const float>(row_scalars) : nullptr,
                         data<const int32_t>(topk_idx),
                         data<const int32_t>(recv_rows),
                         data<char>(out),
                         with_scalars ? data<float>(scalars) : nullptr,
                         static_cast<int>(sizes.num_tokens),
                         sizes.capacity,
                         *row_type_of(type),
                         sizes.hidden};
  const uint32_t variant =
      static_cast<uint32_t>(type) | (weighted ? 0x100u : 0u) | (with_scalars ? 0x200u : 0u);
  Operation operation =
      make_operation(OpKind::kCombine, kCombineChannel, buffer, sizes.num_tokens, variant);
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_combine(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

ffi::Future combine_grad(Site* site, ffi::RunId run, int32_t ordinal, int64_t buffer_id,
                         int64_t fingerprint, int64_t expert_alignment, int64_t zero_tail,
                         AnyBuffer rank, AnyBuffer g, AnyBuffer topk_idx, AnyBuffer recv_rows,
                         AnyBuffer row_weights, AnyBuffer y, Out d_y, Out d_row_weights) {
  const Call call = make_call(site, run, ordinal, buffer_id, fingerprint, rank);
  const Resolved resolved = resolve(call);
  if (!resolved.error.empty()) return refuse(call, resolved, resolved.error);
  const CpuBuffer& buffer = *resolved.buffer;
  const WindowShape& shape = buffer.layout().shape;
  const DataType type = g.element_type();
  const Sizes sizes{dim(g, 0), dim(g, 1), dim(y, 0)};
  const int64_t topk = shape.num_experts_per_tok;
  ShapeCheck check("combine_grad");
  expect_sizes(check, buffer, sizes, type);
  check.expect("topk_idx", topk_idx, DataType::S32, {sizes.num_tokens, topk});
  check.expect("recv_rows", recv_rows, DataType::S32, {shape.num_ranks * sizes.num_tokens, topk});
  check.expect("row_weights", row_weights, DataType::F32, {sizes.capacity});
  check.expect("y", y, type, {sizes.capacity, sizes.hidden});
  check.expect("d_y", *d_y, type, {sizes.capacity, sizes.hidden});
  check.expect("d_row_weights", *d_row_weights, DataType::F32, {sizes.capacity});
  check.expect_true("a positive expert_alignment", expert_alignment > 0);
  if (!check.error().empty()) return refuse(call, resolved, check.error());

  const CombineGradArgs args{data<const char>(g),
                             data<const int32_t>(topk_idx),
                             data<const int32_t>(recv_rows),
                             data<const float>(row_weights),
                             data<const char>(y),
                             data<char>(d_y),
                             data<float>(d_row_weights),
                             static_cast<int>(sizes.num_tokens),
                             sizes.capacity,
                             expert_alignment,
                             zero_tail != 0,
                             *row_type_of(type),
                             sizes.hidden};
  Operation operation = make_operation(OpKind::kCombineGrad, kDispatchChannel, buffer,
                                       sizes.num_tokens, static_cast<uint32_t>(type));
  operation.run = [args](RankContext& context, const OpTag& tag, uint64_t first_epoch) {
    return run_combine_grad(context, args, tag, first_epoch);
  };
  return start(call, resolved, std::move(operation));
}

// Binds what every op takes first: its call site, run, device and buffer.
auto bind_call() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Site>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<int64_t>("buffer_id")
      .Attr<int64_t>("fingerprint");
}

}  // namespace

}  // namespace jax_ep

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_instantiate, jax_ep::instantiate_site,
                              xla::ffi::Ffi::BindInstantiate().Attrs<xla::ffi::Dictionary>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_dispatch_cpu, jax_ep::dispatch,
                              jax_ep::bind_call()
                                  .Attr<int64_t>("expert_alignment")
                                  .Attr<int64_t>("zero_tail")
                                  .Arg<xla::ffi::AnyBuffer>()    // rank
                                  .Arg<xla::ffi::AnyBuffer>()    // x
                                  .Arg<xla::ffi::AnyBuffer>()    // topk_idx
                                  .Arg<xla::ffi::AnyBuffer>()    // topk_weights
                                  .Ret<xla::ffi::AnyBuffer>()    // tokens
                                  .Ret<xla::ffi::AnyBuffer>()    // weights
                                  .Ret<xla::ffi::AnyBuffer>()    // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()    // valid_sizes
                                  .Ret<xla::ffi::AnyBuffer>()    // num_dropped
                                  .Ret<xla::ffi::AnyBuffer>()    // clean_topk_idx
                                  .Ret<xla::ffi::AnyBuffer>());  // recv_rows

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_cpu, jax_ep::combine,
                              jax_ep::bind_call()
                                  .Attr<int64_t>("weighted")
                                  .Attr<int64_t>("with_scalars")
                                  .Arg<xla::ffi::AnyBuffer>()    // rank
                                  .Arg<xla::ffi::AnyBuffer>()    // y
                                  .Arg<xla::ffi::AnyBuffer>()    // row_weights
                                  .Arg<xla::ffi::AnyBuffer>()    // row_scalars
                                  .Arg<xla::ffi::AnyBuffer>()    // topk_idx
                                  .Arg<xla::ffi::AnyBuffer>()    // recv_rows
                                  .Ret<xla::ffi::AnyBuffer>()    // out
                                  .Ret<xla::ffi::AnyBuffer>());  // scalars

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_combine_grad_cpu, jax_ep::combine_grad,
                              jax_ep::bind_call()
                                  .Attr<int64_t>("expert_alignment")
                                  .Attr<int64_t>("zero_tail")
                                  .Arg<xla::ffi::AnyBuffer>()    // rank
                                  .Arg<xla::ffi::AnyBuffer>()    // g
                                  .Arg<xla::ffi::AnyBuffer>()    // topk_idx
                                  .Arg<xla::ffi::AnyBuffer>()    // recv_rows
                                  .Arg<xla::ffi::AnyBuffer>()    // row_weights
                                  .Arg<xla::ffi::AnyBuffer>()    // y
                                  .Ret<xla::ffi::AnyBuffer>()    // d_y
                                  .Ret<xla::ffi::AnyBuffer>());  // d_row_weights
