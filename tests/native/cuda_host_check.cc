// The host side of the CUDA backend against a fake runtime: what buffers give kernels, what they
// make of kernels' reports, how they end, and what they say when they cannot be made. Exit status
// 0: fine.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/combine.h"
#include "cuda/combine_grad.h"
#include "cuda/cuda_buffer.h"
#include "cuda/dispatch.h"
#include "cuda/ll_combine.h"
#include "cuda/ll_combine_grad.h"
#include "cuda/ll_dispatch.h"
#include "cuda_fake_runtime.h"
#include "cuda_fake_symmetric.h"

namespace jax_ep::gpu {

// In place of what nvcc compiles.
cudaError_t prepare_dispatch() { return cudaSuccess; }
cudaError_t prepare_notify() { return cudaSuccess; }
cudaError_t prepare_combine() { return cudaSuccess; }
cudaError_t prepare_combine_grad() { return cudaSuccess; }
cudaError_t prepare_ll_dispatch() { return cudaSuccess; }
cudaError_t prepare_ll_combine() { return cudaSuccess; }
cudaError_t prepare_ll_combine_grad() { return cudaSuccess; }
ScratchLayout ScratchLayout::make(const WindowShape&, int) {
  ScratchLayout layout{};
  layout.total_bytes = 4096;
  return layout;
}
Scratch ScratchLayout::at(char* memory, RankState* state) const {
  Scratch scratch{};
  scratch.state = state;
  scratch.routes = reinterpret_cast<SendRoute*>(memory);
  return scratch;
}

namespace {

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

CudaBufferOptions options(std::vector<std::vector<int>> ordinals) {
  return {std::move(ordinals), 8, 2, 1024, 2, 16, 64, 0.2, 77, 0};
}

std::shared_ptr<CudaBuffer> make_buffer(const CudaBufferOptions& asked) {
  return create_cuda_buffer(std::nullopt, asked);
}

Operation operation_of(CudaBuffer& buffer, int rank) {
  return buffer.group(0).rank(rank).operation({OpKind::kDispatch, 40, 3, 9}, kDispatchChannel,
                                              nullptr);
}

uint64_t& word(const Operation& op, int64_t offset) {
  return *reinterpret_cast<uint64_t*>(op.control + offset);
}

template <class Error, class Make>
void expect_error(Make make, const std::string& part) {
  try {
    make();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    std::printf("'%s' does not say '%s'\n", error.what(), part.c_str());
    std::exit(1);
  }
  std::printf("nothing said '%s'\n", part.c_str());
  std::exit(1);
}

void check_operations() {
  const auto buffer = make_buffer(options({{0, 1}}));
  const Operation first = operation_of(*buffer, 0);
  const Operation second = operation_of(*buffer, 1);
  CHECK(buffer->id() > int64_t{1} << 32);
  CHECK(buffer->window_bytes() == first.layout.total_bytes());
  CHECK(second.rank == 1 && second.num_tokens == 40 && second.num_chunks == 3);
  CHECK(second.timeout_ns == 200'000'000);
  CHECK(first.peers->open == 1 && first.peers != second.peers);
  for (int rank = 0; rank < 2; ++rank) {
    const PeerMemory memory = buffer->group(0).rank(rank).memory();
    CHECK(first.peers->window[rank] == memory.data &&
          second.peers->control[rank] == memory.control);
    for (int64_t i = 0; i < first.layout.total_bytes(); ++i) CHECK(memory.data[i] == 0);
  }
  close_cuda_buffer(buffer->id());
}

void check_reports() {
  const auto buffer = make_buffer(options({{0, 1}}));
  CudaGroup& group = *buffer->groups()[0];
  const Operation first = operation_of(*buffer, 0);
  const Operation second = operation_of(*buffer, 1);
  word(first, first.control_layout().epoch(kDispatchChannel)) = 6;
  CHECK(group.epochs(kDispatchChannel) == 6 && group.epochs(kCombineChannel) == 0);

  second.mailbox->first_fault = pack_fault(3, 1, true, -7);
  second.mailbox->faults_found = 4;
  const auto faults = group.take_data_faults();
  CHECK(faults && faults->rank == 1 && faults->count == 4);
  CHECK(faults->first.token == 3 && faults->first.k == 1 && faults->first.duplicate);
  CHECK(faults->first.value == -7 && !group.take_data_faults());

  CHECK(!group.refusal() && group.error_records().empty());
  first.mailbox->error = {ErrorKind::kTimeout, OpKind::kCombine, WaitFor::kTag, 0, 1, 7, 1, 2};
  second.mailbox->error = {ErrorKind::kMismatch, OpKind::kDispatch, WaitFor::kStart, 1, 1, 7, 1, 0};
  CHECK(group.error_records().size() == 2);
  CHECK(group.refusal()->rfind("EpMismatchError: dispatch, epoch 7: rank 1 of the buffer is rank 0",
                               0) == 0);
  group.abort(OpKind::kCombine, "too late to matter");
  CHECK(group.error_records().size() == 2);
  buffer->reset();
  CHECK(!group.refusal() && group.epochs(kDispatchChannel) == 0);

  group.abort(OpKind::kCombine, "EpUsageError: why");
  CHECK(*group.refusal() == "EpUsageError: why" && group.error_records().size() == 1);
  CHECK(word(second, second.control_layout().poison()) != 0);
  buffer->reset();
  CHECK(!group.refusal() && word(second, second.control_layout().poison()) == 0);
  CHECK(second.peers->open == 1);
  close_cuda_buffer(buffer->id());
}

void check_low_latency() {
  CudaBufferOptions asked = options({{0, 1}});
  asked.low_latency = true;
  asked.tokens_per_epoch = asked.max_tokens_per_rank;
  const auto buffer = make_buffer(asked);
  const CudaGroup& group = buffer->group(0);
  const Operation op = operation_of(*buffer, 0);
  CHECK(op.layout.shape.records && op.num_chunks == 1);
  const auto holds_sentinels = [&](int rank) {
    const char* data = group.rank(rank).memory().data;
    const int64_t last = op.layout.combine_row(1, 1, 63) + op.layout.shape.row_bytes - 1;
    return data[op.layout.dispatch_message(0, 0, 0)] == '\xFF' && data[last] == '\xFF' &&
           data[op.layout.route_records(1, 1, 63)] == 0;
  };
  CHECK(holds_sentinels(0) && holds_sentinels(1));

  ErrorRecord& error = op.mailbox->error;
  error = {ErrorKind::kUsage, OpKind::kDispatch, WaitFor::kStart, 0, 0, 3, 0, 2};
  CHECK(group.refusal()->rfind("EpUsageError: dispatch, epoch 3: two operations", 0) == 0);
  CHECK(group.refusal()->find("the start of epoch 1 has had no done") != std::string::npos);
  error = {ErrorKind::kUsage, OpKind::kCombine, WaitFor::kStart, 0, 0, 4, 4, 3};
  CHECK(group.refusal()->rfind("EpUsageError: combine done: its pending names epoch 3", 0) == 0);
  CHECK(group.refusal()->find("buffer.reset() makes") != std::string::npos);

  // Tickets of starts from before a reset no longer fit.
  CHECK(op.peers->generation == 0);
  op.scratch.state->low_latency[kDispatchChannel].started = 5;
  group.rank(1).memory().data[op.layout.dispatch_message(0, 0, 0)] = 7;
  buffer->reset();
  CHECK(!group.refusal() && holds_sentinels(0) && holds_sentinels(1));
  CHECK(op.peers->generation == 1 && op.peers->open == 1);
  CHECK(op.scratch.state->low_latency[kDispatchChannel].started == 0);
  close_cuda_buffer(buffer->id());
}

// Each rank has counters of its own, at an address for either side, and the host reads what
// kernels leave there.
void check_notices() {
  using Clock = NoticeBoard::Clock;
  const auto buffer = make_buffer(options({{0, 1}}));
  NoticeBoard& board = buffer->notices();
  const NoticeLayout notice{8};
  const uint32_t ticket = board.next_ticket();
  CHECK(ticket == 1 && board.next_ticket() == 2);
  const auto tell = [&](int rank, uint32_t given, uint32_t rows) {
    uint64_t* words = board.counters(0, rank).first;
    words[notice.recv_tokens(given)] = ticket_word(given, rows);
    for (int e = 0; e < 8; ++e) words[notice.expert_tokens(given, e)] = ticket_word(given, e);
  };
  CHECK(board.counters(0, 0).first != board.counters(0, 1).first);
  tell(0, ticket, 5);
  const NoticeReading pending = board.read(ticket, Clock::now());
  CHECK(pending.state == CounterState::kPending && pending.rank == 1 && pending.counter == 0);
  tell(1, ticket, 6);
  const NoticeReading ready = board.read(ticket, Clock::now());
  CHECK(ready.state == CounterState::kReady && ready.values.size() == 18);
  CHECK(ready.values[0] == 5 && ready.values[9] == 6 && ready.values[17] == 7);
  tell(0, ticket + kNoticeSlots, 9);
  CHECK(board.read(ticket, Clock::now()).state == CounterState::kReused);
  close_cuda_buffer(buffer->id());
}

void check_groups_of_one() {
  const auto buffer = make_buffer(options({{0}, {1}}));
  CHECK(buffer->window_bytes() == 0 && buffer->groups().size() == 2);
  CHECK(buffer->find_device(1)->group == 1 && !buffer->find_device(2));
  // Signals have room, payload has none.
  const Operation op = operation_of(*buffer, 0);
  CHECK(op.layout.total_bytes() < 20'000);
  CHECK(op.layout.dispatch_tag(1, 0) + 8 <= op.layout.total_bytes());
  buffer->abort(OpKind::kDispatch, "nobody waits for anybody");
  CHECK(!buffer->group(0).refusal());
  close_cuda_buffer(buffer->id());
}

void check_closing() {
  const int64_t used = fake_cuda().used_bytes;
  const auto buffer = make_buffer(options({{0, 1}}));
  const Operation op = operation_of(*buffer, 0);
  const int64_t id = buffer->id();
  CHECK(find_cuda_buffer(id) == buffer);
  close_cuda_buffer(id);
  close_cuda_buffer(id);
  CHECK(find_cuda_buffer(id) == nullptr);
  CHECK(op.peers->open == 0);  // still there for graphs that are replayed
  CHECK(op.scratch.state->error_claimed == 0);
  CHECK(fake_cuda().used_bytes - used < 40'000);
  CHECK(make_buffer(options({{0, 1}}))->id() > id);
}

void check_a_device_that_stays_busy() {
  const auto buffer = make_buffer(options({{0, 1}}));
  const int64_t used = fake_cuda().used_bytes;
  fake_cuda().busy_ms = 60'000;
  const auto begin = std::chrono::steady_clock::now();
  close_cuda_buffer(buffer->id());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  fake_cuda().busy_ms = 0;
  // The deadline and a grace, not the minute; and what a kernel may still use is not freed.
  CHECK(took.count() < 40);
  CHECK(fake_cuda().used_bytes == used);
}

void check_refusals() {
  CudaBufferOptions asked = options({{0, 1}});
  asked.num_sms = 101;
  expect_error<std::invalid_argument>([&] { make_buffer(asked); },
                                      "num_sms=101 is too many: GPU 0 has 132");
  asked.num_sms = 100;
  close_cuda_buffer(make_buffer(asked)->id());
  expect_error<std::invalid_argument>([&] { make_buffer(options({{5}})); },
                                      "GPU 5 is not among the 2");
  fake_cuda().peers_reachable = false;
  expect_error<std::invalid_argument>([&] { make_buffer(options({{0, 1}})); },
                                      "GPU 0 cannot access the memory of GPU 1");
  fake_cuda().peers_reachable = true;

  const int64_t used = fake_cuda().used_bytes;
  const int64_t window = operation_of(*make_buffer(options({{0, 1}})), 0).layout.total_bytes();
  const int64_t taken = fake_cuda().used_bytes;
  fake_cuda().memory_bytes = taken + window + window / 2;
  expect_error<CudaError>([&] { make_buffer(options({{0, 1}})); },
                          "chunk_tokens=16 (by default min(max_tokens_per_rank, 4096)) and rows of "
                          "2048 bytes (hidden * itemsize) needs " +
                              std::to_string(window) + " bytes on GPU 1");
  CHECK(fake_cuda().used_bytes - taken < 40'000);  // the first rank's window is free again
  CHECK(taken - used >= 2 * window);
  fake_cuda().memory_bytes = int64_t{1} << 40;
}

}  // namespace
}  // namespace jax_ep::gpu

namespace jax_ep::gpu {
namespace {

// Two buffers stand for those of two processes with a rank each.
void check_ranks_of_several_processes() {
  const auto first = make_buffer(options({{0, -1}}));
  const auto second = make_buffer(options({{-1, 1}}));
  CHECK(first->is_shared() && second->is_shared() && !make_buffer(options({{0, 1}}))->is_shared());
  CHECK(first->find_device(0) && !first->find_device(1));
  expect_error<std::invalid_argument>([&] { first->join({}); }, "memory of rank 1");
  expect_error<std::invalid_argument>([&] { first->join({"short"}); }, "5 bytes");
  const std::vector<std::string> offers{first->offer(), second->offer()};
  first->join(offers);
  second->join(offers);
  const Operation here = operation_of(*first, 0);
  const Operation there = operation_of(*second, 1);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(here.peers->window[rank] == there.peers->window[rank]);
    CHECK(here.peers->control[rank] == there.peers->control[rank]);
  }
  CHECK(here.peers->open == 1 && there.peers->open == 1 && first->num_sms() > 0);

  first->abort(OpKind::kCombine, "EpUsageError: why");
  CHECK(word(there, there.control_layout().poison()) != 0 && !second->group(0).refusal());
  there.mailbox->poison = 1;  // an operation there has seen it
  CHECK(second->group(0).refusal()->rfind("EpTimeoutError: rank 1 stopped, because rank 0", 0) ==
        0);
  CHECK(second->group(0).error_records()[0].first.peer == 0);
  second->reset();
  first->reset();
  CHECK(!second->group(0).refusal() && !first->group(0).refusal());

  // A window goes only when the other process has unmapped it.
  const int64_t window_bytes = here.layout.total_bytes();
  const int64_t before = fake_cuda().used_bytes;
  CHECK(second->group(0).ranks_gone().empty());
  close_cuda_buffer(first->id());
  free_what_all_have_left();
  CHECK(second->group(0).ranks_gone() == std::vector<int>{0});
  CHECK(before - fake_cuda().used_bytes < window_bytes);
  CHECK(fake_cuda().mapped == 2);  // the second's, of both kinds
  close_cuda_buffer(second->id());
  CHECK(fake_cuda().mapped == 0);
  free_what_all_have_left();
  CHECK(before - fake_cuda().used_bytes >= 2 * window_bytes);
}

// One process's rank of two, over symmetric memory.
std::shared_ptr<CudaBuffer> make_symmetric(const std::shared_ptr<FakeSymmetric>& memory) {
  CudaBufferOptions asked = options({{0, -1}});
  asked.staging = true;
  asked.symmetric = memory;
  const auto buffer = make_buffer(asked);
  buffer->join_symmetric();
  return buffer;
}

void check_symmetric_memory() {
  constexpr int64_t kRoom = 1 << 24;
  const auto memory = std::make_shared<FakeSymmetric>(0, kRoom, /*has_addresses=*/false);
  const auto buffer = make_symmetric(memory);
  const Operation op = operation_of(*buffer, 0);
  CHECK(op.layout.shape.staging && buffer->window_bytes() == op.layout.total_bytes());
  CHECK(op.control == memory->own().control && op.peers->window[0] == memory->own().data);
  CHECK(op.peers->window[1] == nullptr && op.peers->control[1] == nullptr);
  CHECK(op.peers->num_remote == 1 && op.peers->pe[1] == 11 && op.peers->open == 1);
  for (int64_t i = 0; i < op.layout.total_bytes(); ++i) CHECK(memory->own().data[i] == 0);
  CHECK(word(op, op.control_layout().epoch(kCombineChannel)) == 0 && memory->asked.empty());

  buffer->abort(OpKind::kCombine, "EpUsageError: why");
  CHECK(memory->asked == std::vector<std::string>{"store to 1 value 1 at 0"});
  CHECK(word(op, op.control_layout().poison()) != 0);
  memory->asked.clear();
  buffer->reset();  // what was put has arrived before anything is cleared
  CHECK(memory->asked == std::vector<std::string>{"settle"});
  CHECK(word(op, op.control_layout().poison()) == 0 && op.peers->num_remote == 1);

  memory->asked.clear();
  close_cuda_buffer(buffer->id());
  CHECK(op.peers->open == 0 && memory->asked.size() >= 4);
  CHECK(memory->asked.front() == "settle" && memory->asked.back() == "give back");
  CHECK(memory->asked[memory->asked.size() - 2].rfind("store to 1 value 1 at ", 0) == 0);

  const auto near = std::make_shared<FakeSymmetric>(0, kRoom, /*has_addresses=*/true);
  const auto direct = make_symmetric(near);
  const Operation there = operation_of(*direct, 0);
  CHECK(there.peers->window[1] == near->far() && there.peers->control[1] == near->far() + 1);
  CHECK(there.peers->num_remote == 0);
  close_cuda_buffer(direct->id());

  const auto small = std::make_shared<FakeSymmetric>(0, 4096, false);
  expect_error<std::invalid_argument>([&] { make_symmetric(small); }, "smaller than the window");
}

}  // namespace
}  // namespace jax_ep::gpu

int main() {
  using namespace jax_ep::gpu;
  check_operations();
  check_reports();
  check_low_latency();
  check_notices();
  check_groups_of_one();
  check_closing();
  check_refusals();
  check_ranks_of_several_processes();
  check_symmetric_memory();
  check_a_device_that_stays_busy();
  std::printf("fine\n");
  std::fflush(stdout);
  std::_Exit(0);  // threads that wait for the busy device are still there
}
