#include "transport/cuda_window.h"

#include <sstream>
#include <stdexcept>
#include <utility>

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

int64_t CudaWindow::bytes_of_control(int num_ranks, int64_t lasting_bytes) {
  return align_up(ControlLayout{num_ranks}.total_bytes(), kBufferAlignment) + lasting_bytes;
}

CudaWindow::CudaWindow(int ordinal, const WindowLayout& layout, int64_t lasting_bytes)
    : data_bytes_(layout.total_bytes()),
      control_bytes_(bytes_of_control(layout.shape.num_ranks, 0)) {
  try {
    data_ = DeviceMemory(ordinal, layout.total_bytes(), describe_window(layout));
  } catch (const CudaError& error) {
    throw CudaError(error.what() + remedy(layout));
  }
  DeviceMemory lasting(ordinal, control_bytes_ + lasting_bytes, "a control block");
  control_ = lasting.data();
  lasting_ = control_ + control_bytes_;
  lasting.keep_for_ever();
}

CudaWindow::CudaWindow(int ordinal, const WindowLayout& layout, int64_t lasting_bytes,
                       std::shared_ptr<SymmetricMemory> symmetric)
    : symmetric_(std::move(symmetric)),
      data_bytes_(layout.total_bytes()),
      control_bytes_(bytes_of_control(layout.shape.num_ranks, 0)) {
  if (symmetric_->data_bytes() < data_bytes_ ||
      symmetric_->control_bytes() < control_bytes_ + lasting_bytes) {
    throw std::invalid_argument("the symmetric memory is smaller than the window");
  }
  const PeerMemory memory = symmetric_->own();
  control_ = memory.control;
  lasting_ = control_ + control_bytes_;
  const DeviceGuard guard(ordinal);
  require_ok(cudaMemset(memory.data, 0, static_cast<size_t>(data_bytes_)), "zeroing a window");
  require_ok(cudaMemset(control_, 0, static_cast<size_t>(control_bytes_ + lasting_bytes)),
             "zeroing a control block");
  // Side streams do not wait for the stream that the memsets are on.
  require_ok(cudaStreamSynchronize(nullptr), "zeroing a window");
}

void CudaWindow::abandon_data() {
  if (symmetric_ != nullptr) symmetric_->keep_for_ever();
  data_.keep_for_ever();
}

void CudaWindow::free_data() {
  if (symmetric_ != nullptr) symmetric_->give_back();
  data_.free();
}

}  // namespace jax_ep::gpu
