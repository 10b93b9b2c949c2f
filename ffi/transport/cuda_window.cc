#include "transport/cuda_window.h"

#include <sstream>

namespace jax_ep::gpu {

namespace {

bool carries_payload(Region region) {
  return region == kDispatchData || region == kDispatchSend || region == kCombineData ||
         region == kCombineScalars || region == kCombineSend;
}

std::string describe_window(const WindowLayout& layout) {
  const WindowShape& shape = layout.shape;
  std::ostringstream text;
  text << "a window for num_ranks=" << shape.num_ranks << ", ";
  if (shape.records) {
    text << "max_tokens_per_rank=" << shape.tokens_per_epoch << " (mode='low_latency')";
  } else {
    text << "chunk_tokens=" << shape.tokens_per_epoch
         << " (by default min(max_tokens_per_rank, 4096))";
  }
  text << " and rows of " << shape.row_bytes << " bytes (hidden * itemsize)";
  return text.str();
}

std::string remedy(const WindowLayout& layout) {
  const std::string grows =
      layout.shape.records
          ? "max_tokens_per_rank * row bytes: lower max_tokens_per_rank to what a step has."
          : "chunk_tokens * row bytes: lower chunk_tokens, which costs a little speed and nothing "
            "else.";
  return ". The window grows with num_ranks * " + grows +
         " JAX takes 75 % of a GPU's memory when it starts: XLA_PYTHON_CLIENT_MEM_FRACTION=0.6 in "
         "the environment leaves more for windows.";
}

}  // namespace

WindowLayout without_payload(const WindowLayout& layout) {
  WindowLayout signals = layout;
  int64_t end = 0;
  for (int r = 0; r < kNumRegions; ++r) {
    const auto region = static_cast<Region>(r);
    signals.offset[r] = align_up(end, kRegionAlignment);
    if (!carries_payload(region)) end = signals.offset[r] + region_bytes(layout.shape, region);
  }
  signals.buffer_bytes = align_up(end, kBufferAlignment);
  return signals;
}

CudaWindow::CudaWindow(int ordinal, const WindowLayout& layout, int64_t lasting_bytes)
    : control_bytes_(ControlLayout{layout.shape.num_ranks}.total_bytes()) {
  try {
    data_ = DeviceMemory(ordinal, layout.total_bytes(), describe_window(layout));
  } catch (const CudaError& error) {
    throw CudaError(error.what() + remedy(layout));
  }
  control_bytes_ = align_up(control_bytes_, kBufferAlignment);
  DeviceMemory lasting(ordinal, control_bytes_ + lasting_bytes, "a control block");
  control_ = lasting.data();
  lasting_ = control_ + control_bytes_;
  lasting.keep_for_ever();
}

}  // namespace jax_ep::gpu
