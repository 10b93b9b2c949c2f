// A group of ranks for the native GPU tests: any number of ranks on any GPUs, several of them on
// one GPU if need be ("virtual ranks", a stream each), with host copies of all inputs.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/combine.h"
#include "cuda/combine_grad.h"
#include "cuda/cuda_rank.h"
#include "cuda/dispatch.h"
#include "cuda/notify.h"
#include "cuda_poison.h"
#include "protocol/epochs.h"
#include "protocol/quantize.h"
#include "transport/cuda_counters.h"
#include "transport/cuda_memory.h"

namespace jax_ep::gpu::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

enum class Routing { kUniform, kSkewed, kFaulty, kSomeRanksEmpty, kOneRank };
enum class Capacity { kWorst, kTight, kDropping };

struct Case {
  const char* name;
  int num_ranks;
  std::vector<int> devices;  // rank r lives on devices[r % size]
  int num_tokens;
  int hidden;
  int num_experts_per_tok;
  int num_experts;
  RowType type = RowType::kBFloat16;
  int tokens_per_epoch = 0;  // 0: num_tokens
  Capacity capacity = Capacity::kWorst;
  int alignment = 1;
  bool zero_tail = true;
  Routing routing = Routing::kUniform;
  bool bulk = true;
  int num_sms = 0;  // 0: what all ranks of a GPU can have at once
  bool low_latency = false;
};

template <class Body>
void parallel(int64_t count, Body body) {
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> workers;
  for (int w = 0; w < threads; ++w) {
    workers.emplace_back([=, &body] {
      for (int64_t i = count * w / threads; i < count * (w + 1) / threads; ++i) body(i);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// One array on a GPU. Outputs are poisoned with it before every operation.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  void resize(int64_t count) {
    if (count == count_) return;
    if (data_ != nullptr) check(cudaFree(data_), "free");
    count_ = count;
    check(cudaMalloc(&data_, std::max<int64_t>(1, count) * sizeof(T)), "malloc");
  }
  T* get() const { return data_; }
  void put(const std::vector<T>& from) {
    resize(static_cast<int64_t>(from.size()));
    check(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "put");
  }
  std::vector<T> take() const {
    std::vector<T> to(count_);
    check(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "take");
    return to;
  }
  void poison() { check(cudaMemset(data_, 0xA5, count_ * sizeof(T)), "poison"); }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

struct RankData {
  int device;
  cudaStream_t stream;
  std::unique_ptr<CudaRank> rank;
  Array<int32_t> rank_operand;
  // Inputs, on the GPU and here.
  Array<char> x, y, g;
  Array<int32_t> topk;
  Array<float> topk_weights, row_scalars, row_weights;
  std::vector<char> host_x, host_y, host_g;
  std::vector<int32_t> host_topk;
  std::vector<float> host_topk_weights, host_row_scalars;
  // Outputs.
  Array<char> tokens, out, d_y;
  Array<float> weights, scalars, d_row_weights;
  Array<int32_t> group_sizes, valid_sizes, num_dropped, sanitised, recv_rows;
  // Without expansion: one row a message, as dispatch's output and as combine's input.
  Array<char> slots;
  Array<int32_t> row_map;
  // Quantised: rows on their way, and the scales of tokens or slots.
  Array<char> packed;
  Array<float> scales;
  // Notify: its operand, what it gives the program, and where it tells the host.
  Array<uint32_t> ticket;
  Array<int32_t> row_index, counts;
  std::unique_ptr<MappedCounters> counters;
};

class World {
 public:
  World(const Case& c, uint64_t seed, double timeout_s)
      : c_(c), random_(seed), ranks_(c.num_ranks) {
    WindowShape shape{};
    shape.num_ranks = c.num_ranks;
    shape.tokens_per_epoch =
        c.tokens_per_epoch > 0 ? c.tokens_per_epoch : std::max(1, c.num_tokens);
    shape.num_experts = c.num_experts;
    shape.num_experts_per_tok = c.num_experts_per_tok;
    shape.row_bytes = row_bytes();
    shape.records = c.low_latency;
    layout_ = WindowLayout::make(shape);
    if (c.num_ranks == 1) layout_ = without_payload(layout_);
    if (c.devices.size() > 1) require_peer_access(c.devices);
    const auto timeout = std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9));
    for (int r = 0; r < c.num_ranks; ++r) {
      RankData& rank = ranks_[r];
      rank.device = c.devices[r % c.devices.size()];
      use(r);
      check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
      rank.rank = std::make_unique<CudaRank>(
          rank.device, r, CudaSettings{layout_, std::max(1, c.num_tokens), 0, timeout});
      rank.rank_operand.put({r});
      rank.counters = std::make_unique<MappedCounters>(
          make_mapped_counters(rank.device, NoticeLayout{c.num_experts}.num_words()));
    }
    open();
  }

  ~World() {
    for (int r = 0; r < c_.num_ranks; ++r) {
      use(r);
      cudaStreamSynchronize(ranks_[r].stream);
      cudaStreamDestroy(ranks_[r].stream);
    }
  }

  void open() {
    std::vector<PeerMemory> peers;
    for (RankData& rank : ranks_) peers.push_back(rank.rank->memory());
    for (RankData& rank : ranks_) rank.rank->open(peers);
  }
  void reset() {
    synchronise();
    for (RankData& rank : ranks_) rank.rank->clear();
  }

  // From the next launch on.
  void set_launch(int num_sms, bool bulk) {
    c_.num_sms = num_sms;
    c_.bulk = bulk;
  }

  const Case& c() const { return c_; }
  const WindowLayout& layout() const { return layout_; }
  int num_ranks() const { return c_.num_ranks; }
  int experts_per_rank() const { return c_.num_experts / c_.num_ranks; }
  int64_t row_bytes() const { return int64_t{c_.hidden} * row_type_bytes(c_.type); }
  int64_t entries() const { return int64_t{c_.num_tokens} * c_.num_experts_per_tok; }
  int64_t capacity() const { return capacity_; }
  int64_t num_slots() const { return int64_t{c_.num_tokens} * c_.num_ranks; }
  RankData& rank(int r) { return ranks_[r]; }
  std::mt19937_64& random() { return random_; }
  void use(int r) const { check(cudaSetDevice(ranks_[r].device), "set device"); }

  void set_capacity(int64_t capacity) {
    capacity_ = capacity;
    for (int r = 0; r < c_.num_ranks; ++r) {
      use(r);
      RankData& d = ranks_[r];
      for (Array<char>* rows : {&d.tokens, &d.y, &d.d_y}) rows->resize(capacity * row_bytes());
      for (Array<float>* row : {&d.weights, &d.row_scalars, &d.row_weights, &d.d_row_weights}) {
        row->resize(capacity);
      }
      d.out.resize(c_.num_tokens * row_bytes());
      d.scalars.resize(entries());
      d.group_sizes.resize(experts_per_rank());
      d.valid_sizes.resize(experts_per_rank());
      d.num_dropped.resize(1);
      d.sanitised.resize(entries());
      d.recv_rows.resize(entries() * c_.num_ranks);
      d.slots.resize(num_slots() * row_bytes());
      d.row_map.resize(capacity);
      d.packed.resize(c_.num_tokens * packed_row_bytes(c_.hidden));
      d.scales.resize(std::max(capacity, num_slots()) * num_scales(c_.hidden));
      d.row_index.resize(entries());
      d.counts.resize(int64_t{c_.num_ranks} * c_.num_experts);
    }
  }

  // Overwrites all outputs and all payload in the windows: nothing old may be taken for new.
  void poison() {
    synchronise();
    for (int r = 0; r < c_.num_ranks; ++r) {
      use(r);
      RankData& d = ranks_[r];
      for (Array<char>* rows : {&d.tokens, &d.slots, &d.out, &d.d_y, &d.packed}) rows->poison();
      for (Array<float>* row : {&d.weights, &d.scalars, &d.d_row_weights, &d.scales}) row->poison();
      for (Array<int32_t>* row : {&d.group_sizes, &d.valid_sizes, &d.num_dropped, &d.sanitised,
                                  &d.recv_rows, &d.row_map, &d.row_index, &d.counts}) {
        row->poison();
      }
      if (c_.num_ranks == 1) continue;
      for (int parity = 0; parity < kNumBuffers; ++parity) {
        for (Region region : {kDispatchData, kCombineData, kCombineScalars}) {
          char* at = d.rank->memory().data + parity * layout_.buffer_bytes + layout_.offset[region];
          check(cudaMemset(at, 0xA5, region_bytes(layout_.shape, region)), "poison");
        }
      }
    }
    synchronise();
  }

  // Waits for all ranks. What is launched next finds poison in shared memory.
  void synchronise() {
    for (int r = 0; r < c_.num_ranks; ++r) {
      use(r);
      check(cudaDeviceSynchronize(), "synchronise");
    }
    for (int r = 0; r < c_.num_ranks; ++r) {
      use(r);
      check(poison_shared_memory(), "poison shared memory");
    }
  }

  DeviceLimits limits(int r) const {
    DeviceLimits limits = ranks_[r].rank->limits();
    limits.bulk_copy = limits.bulk_copy && c_.bulk;
    return limits;
  }
  int num_sms(int r) const {
    if (c_.num_sms > 0) return c_.num_sms;
    const int sharing = (c_.num_ranks + static_cast<int>(c_.devices.size()) - 1) /
                        static_cast<int>(c_.devices.size());
    return ranks_[r].rank->limits().num_sms / sharing;
  }

  Operation operation(int r, OpKind kind, Channel channel, uint64_t site) const {
    const OpTag tag{kind, static_cast<uint32_t>(c_.num_tokens), static_cast<uint32_t>(c_.type),
                    site};
    return ranks_[r].rank->operation(tag, channel, ranks_[r].rank_operand.get());
  }

  // Leaves a routing in sanitised, row_index and counts, and tells the host under d.ticket.
  void notify(int r, uint64_t site = 0) {
    use(r);
    RankData& d = ranks_[r];
    NotifyParams p{};
    p.op = operation(r, OpKind::kNotify, kDispatchChannel, site);
    p.plan = plan_notify(layout_.shape, c_.num_tokens, num_sms(r), limits(r));
    p.topk_idx = d.topk.get();
    p.ticket = d.ticket.get();
    p.sanitised_idx = d.sanitised.get();
    p.row_index = d.row_index.get();
    p.counts = d.counts.get();
    p.counters = d.counters->device();
    check(launch_notify(p, d.stream), "launch notify");
  }

  // routed: along the routing that notify() has left.
  void dispatch(int r, bool expand = true, uint64_t site = 0, bool routed = false) {
    use(r);
    check(launch_dispatch(dispatch_params(r, expand, site, routed), ranks_[r].stream),
          "launch dispatch");
  }

  DispatchParams dispatch_params(int r, bool expand, uint64_t site, bool routed) {
    RankData& d = ranks_[r];
    DispatchParams p{};
    p.op = operation(r, OpKind::kDispatch, kDispatchChannel, site);
    p.plan = plan_dispatch(layout_.shape, num_sms(r), limits(r));
    p.x = d.x.get();
    p.topk_idx = d.topk.get();
    p.topk_weights = d.topk_weights.get();
    p.tokens = expand ? d.tokens.get() : d.slots.get();
    p.row_map = expand ? nullptr : d.row_map.get();
    p.weights = d.weights.get();
    p.group_sizes = d.group_sizes.get();
    p.valid_sizes = d.valid_sizes.get();
    p.num_dropped = d.num_dropped.get();
    p.sanitised_idx = d.sanitised.get();
    p.recv_rows = d.recv_rows.get();
    p.capacity = capacity_;
    p.expert_alignment = c_.alignment;
    p.zero_tail = c_.zero_tail;
    p.row_type = c_.type;
    if (routed) {
      p.topk_idx = d.sanitised.get();
      p.sanitised_idx = nullptr;
      p.row_index = d.row_index.get();
      p.counts = d.counts.get();
    }
    return p;
  }

  // Values and scales, or rows again, where rows have been.
  void dispatch_float8(int r, bool expand, bool pairs, bool power_of_two) {
    use(r);
    RankData& d = ranks_[r];
    DispatchParams p = dispatch_params(r, expand, 0, false);
    p.hidden = c_.hidden;
    p.packed = d.packed.get();
    p.scales = pairs ? d.scales.get() : nullptr;
    p.power_of_two_scales = power_of_two;
    p.op.layout.shape.row_bytes = packed_row_bytes(c_.hidden);
    p.plan = plan_packed_dispatch(p.op.layout.shape, num_sms(r), limits(r));
    check(launch_dispatch(p, d.stream), "launch quantised dispatch");
  }

  // Along the handle that the last dispatch left in sanitised and recv_rows.
  void combine(int r, bool weighted, bool with_scalars, bool by_message = false,
               uint64_t site = 0) {
    use(r);
    RankData& d = ranks_[r];
    CombineParams p{};
    p.op = operation(r, OpKind::kCombine, kCombineChannel, site);
    p.plan = plan_combine(layout_.shape, num_sms(r), limits(r));
    p.y = by_message ? d.slots.get() : d.y.get();
    p.y_by_message = by_message;
    p.row_weights = weighted ? d.row_weights.get() : nullptr;
    p.row_scalars = with_scalars ? d.row_scalars.get() : nullptr;
    p.topk_idx = d.sanitised.get();
    p.recv_rows = d.recv_rows.get();
    p.out = d.out.get();
    p.scalars = with_scalars ? d.scalars.get() : nullptr;
    p.capacity = capacity_;
    p.row_type = c_.type;
    check(launch_combine(p, d.stream), "launch combine");
  }

  void combine_grad(int r, uint64_t site = 0) {
    use(r);
    RankData& d = ranks_[r];
    CombineGradParams p{};
    p.op = operation(r, OpKind::kCombineGrad, kDispatchChannel, site);
    p.plan = plan_combine_grad(layout_.shape, num_sms(r), limits(r));
    p.g = d.g.get();
    p.topk_idx = d.sanitised.get();
    p.recv_rows = d.recv_rows.get();
    p.row_weights = d.row_weights.get();
    p.y = d.y.get();
    p.d_y = d.d_y.get();
    p.d_row_weights = d.d_row_weights.get();
    p.capacity = capacity_;
    p.expert_alignment = c_.alignment;
    p.zero_tail = c_.zero_tail;
    p.row_type = c_.type;
    check(launch_combine_grad(p, d.stream), "launch combine_grad");
  }

 private:
  Case c_;
  std::mt19937_64 random_;
  std::vector<RankData> ranks_;
  WindowLayout layout_;
  int64_t capacity_ = 0;
};

}  // namespace jax_ep::gpu::test
