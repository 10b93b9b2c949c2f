#include "cuda/cuda_rank.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "cuda/combine.h"
#include "cuda/combine_grad.h"
#include "cuda/dispatch.h"
#include "cuda/ll_combine.h"
#include "cuda/ll_combine_grad.h"
#include "cuda/ll_dispatch.h"
#include "cuda/notify.h"
#include "protocol/epochs.h"

namespace jax_ep::gpu {

namespace {

constexpr int kSmStep = 8;
constexpr int kSmsForOthers = 32;
constexpr int kOldestCapability = 8;  // major: kernels use sm_80's memory model and async copies

// A GPU that this build can use, or std::invalid_argument.
DeviceLimits usable_device(int ordinal) {
  int count = 0;
  require_ok(cudaGetDeviceCount(&count), "counting GPUs");
  if (ordinal < 0 || ordinal >= count) {
    throw std::invalid_argument("GPU " + std::to_string(ordinal) + " is not among the " +
                                std::to_string(count) + " that CUDA shows this process");
  }
  DeviceLimits limits{};
  int major = 0;
  require_ok(device_limits(ordinal, &limits), "reading a GPU's limits");
  require_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
             "reading a GPU's compute capability");
  if (major < kOldestCapability) {
    throw std::invalid_argument("GPU " + std::to_string(ordinal) + " has compute capability " +
                                std::to_string(major) +
                                ".x; the kernels need 8.0 or more. Pass backend='reference'.");
  }
  return limits;
}

int checked_num_sms(int requested, int ordinal, int device_sms) {
  if (requested == 0) return default_num_sms(device_sms);
  const int most = most_num_sms(device_sms);
  if (requested <= most) return requested;
  std::ostringstream text;
  text << "num_sms=" << requested << " is too many: GPU " << ordinal << " has " << device_sms
       << " multiprocessors, and XLA's collectives must find room beside a kernel that waits. Pass "
          "at most "
       << most << ", or None for " << default_num_sms(device_sms);
  throw std::invalid_argument(text.str());
}

using Prepare = cudaError_t (*)();

void load_kernels(int ordinal, const WindowShape& shape) {
  const DeviceGuard guard(ordinal);
  std::vector<Prepare> kernels{prepare_dispatch, prepare_combine, prepare_combine_grad,
                               prepare_notify};
  if (shape.records) kernels = {prepare_ll_dispatch, prepare_ll_combine, prepare_ll_combine_grad};
  for (const Prepare prepare : kernels) {
    const cudaError_t status = prepare();
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      throw std::invalid_argument(
          "jax_ep was built without code for GPU " + std::to_string(ordinal) +
          ". Build it again with -C cmake.define.JAX_EP_CUDA_ARCHITECTURES=native, or pass "
          "backend='reference'.");
    }
    require_ok(status, "loading the kernels on GPU " + std::to_string(ordinal));
  }
}

}  // namespace

int default_num_sms(int device_sms) {
  const int half = device_sms / 2;
  return half >= kSmStep ? half / kSmStep * kSmStep : std::max(1, half);
}

int most_num_sms(int device_sms) {
  return std::max({1, device_sms / 2, device_sms - kSmsForOthers});
}

CudaRank::CudaRank(int ordinal, int rank, const CudaSettings& settings)
    : ordinal_(ordinal),
      rank_(rank),
      settings_(settings),
      limits_(usable_device(ordinal)),
      num_sms_(checked_num_sms(settings.num_sms, ordinal, limits_.num_sms)),
      scratch_layout_(ScratchLayout::make(settings.layout.shape, settings.max_tokens_per_rank)),
      window_(settings.symmetric
                  ? CudaWindow(ordinal, settings.layout, sizeof(Lasting), settings.symmetric)
                  : CudaWindow(ordinal, settings.layout, sizeof(Lasting))),
      scratch_(ordinal, scratch_layout_.total_bytes,
               "scratch for max_tokens_per_rank=" + std::to_string(settings.max_tokens_per_rank)),
      mailbox_(ordinal),
      side_(std::make_unique<SideStream>(ordinal)) {
  load_kernels(ordinal, settings.layout.shape);
  fill_payload();
  side_->finish();
}

void CudaRank::open(const std::vector<PeerMemory>& peers) {
  PeerTable table{};
  table.open = 1;
  table.generation = generation_;
  for (size_t r = 0; r < peers.size(); ++r) {
    table.window[r] = peers[r].data;
    table.control[r] = peers[r].control;
    if (peers[r].control != nullptr) continue;
    table.pe[r] = settings_.symmetric->pe(static_cast<int>(r));
    ++table.num_remote;
  }
  side_->write(reinterpret_cast<char*>(&lasting()->peers), &table, sizeof(table));
  side_->finish();
}

void CudaRank::shut() {
  side_->fill(reinterpret_cast<char*>(&lasting()->peers.open), 0, sizeof(uint32_t));
  side_->finish();
}

void CudaRank::clear() {
  side_->fill(window_.memory().data, 0, window_.data_bytes());
  side_->fill(window_.memory().control, 0, window_.control_bytes());
  side_->fill(reinterpret_cast<char*>(&lasting()->state), 0, sizeof(RankState));
  side_->fill(scratch_.data(), 0, scratch_.bytes());
  ++generation_;
  side_->write(reinterpret_cast<char*>(&lasting()->peers.generation), &generation_,
               sizeof(generation_));
  fill_payload();
  side_->finish();
  mailbox() = Mailbox{};
}

void CudaRank::fill_payload() {
  if (!settings_.layout.shape.records) return;
  const DeviceGuard guard(ordinal_);
  require_ok(fill_ll_window(window_.memory().data, settings_.layout, side_->stream()),
             "preparing a low-latency window");
}

void CudaRank::poison(char* control) {
  const ControlLayout layout{settings_.layout.shape.num_ranks};
  side_->fill(control + layout.poison(), 1, sizeof(uint32_t));
}

void CudaRank::poison_rank(int rank) {
  const ControlLayout layout{settings_.layout.shape.num_ranks};
  settings_.symmetric->store(rank, window_.memory().control + layout.poison(), 1u + rank_,
                             side_->stream());
}

void CudaRank::settle() {
  if (settings_.symmetric != nullptr) settings_.symmetric->settle(side_->stream());
}

int64_t CudaRank::symmetric_control_bytes(int num_ranks) {
  return CudaWindow::bytes_of_control(num_ranks, sizeof(Lasting));
}

void CudaRank::leave_rank(int rank) {
  settings_.symmetric->store(rank, reinterpret_cast<char*>(&lasting()->left[rank_]), 1u,
                             side_->stream());
  side_->finish();
}

void CudaRank::leave(char* control) {
  const char* own = window_.memory().control;
  const int64_t offset = reinterpret_cast<const char*>(&lasting()->left[rank_]) - own;
  const uint32_t left = 1;
  side_->write(control + offset, &left, sizeof(left));
  side_->finish();
}

bool CudaRank::all_left(const std::vector<int>& ranks) {
  uint32_t left[kMaxRanks];
  side_->read(left, reinterpret_cast<const char*>(lasting()->left), sizeof(left));
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return left[rank] != 0; });
}

void CudaRank::free_memory() {
  window_.free_data();
  scratch_.free();
}

void CudaRank::abandon_memory() {
  window_.abandon_data();
  scratch_.keep_for_ever();
}

uint64_t CudaRank::epochs(Channel channel) {
  uint64_t epochs = 0;
  if (settings_.layout.shape.records) {
    const uint64_t* done = &lasting()->state.low_latency[channel].done;
    side_->read(&epochs, reinterpret_cast<const char*>(done), sizeof(epochs));
    return epochs / kLaunchShare;
  }
  const ControlLayout control{settings_.layout.shape.num_ranks};
  side_->read(&epochs, window_.memory().control + control.epoch(channel), sizeof(epochs));
  return epochs;
}

Operation CudaRank::operation(const OpTag& tag, Channel channel,
                              const int32_t* rank_operand) const {
  const int num_tokens = static_cast<int>(tag.num_tokens);
  const int tokens_per_epoch = settings_.layout.shape.tokens_per_epoch;
  Operation op{};
  op.layout = settings_.layout;
  op.rank = rank_;
  op.kind = tag.op;
  op.channel = channel;
  op.tag = tag_value(tag);
  op.num_tokens = num_tokens;
  op.tokens_per_epoch = tokens_per_epoch;
  op.num_chunks = num_epochs(num_tokens, tokens_per_epoch);
  op.timeout_ns = static_cast<uint64_t>(settings_.timeout.count());
  op.rank_operand = rank_operand;
  op.peers = &lasting()->peers;
  op.control = window_.memory().control;
  op.mailbox = mailbox_.device();
  op.scratch = scratch_layout_.at(scratch_.data(), &lasting()->state);
  return op;
}

}  // namespace jax_ep::gpu
