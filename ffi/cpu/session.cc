#include "cpu/session.h"

#include <algorithm>
#include <thread>

#include "cpu/strand.h"

namespace jax_ep {

namespace {

constexpr int kSpins = 200;  // a few microseconds: about what parking and waking cost
constexpr std::chrono::microseconds kParkSlice{
    20000};  // how often a parked waiter looks at the clock

// Adds its lifetime to what was waited for a peer.
class WaitTimer {
 public:
  WaitTimer(std::vector<int64_t>& waited_ns, int peer)
      : waited_ns_(static_cast<size_t>(peer) < waited_ns.size() ? &waited_ns[peer] : nullptr) {
    if (waited_ns_ != nullptr) begin_ = std::chrono::steady_clock::now();
  }
  ~WaitTimer() {
    if (waited_ns_ == nullptr) return;
    const auto time = std::chrono::steady_clock::now() - begin_;
    *waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  int64_t* waited_ns_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace

Session::Session(RankContext& context, Channel channel, const OpTag& tag)
    : context_(context),
      window_(context.window),
      channel_(channel),
      op_(tag.op),
      tag_(tag_value(tag)),
      random_(0x9E3779B9u * static_cast<uint32_t>(context.window.rank + 1)) {}

bool Session::poisoned() const {
  char* word = window_.control(rank(), window_.control_layout.poison());
  return atomic32(word).load(std::memory_order_acquire) != 0;
}

void Session::give_up(const Point& point, ErrorKind kind, uint64_t seen) {
  context_.report({kind, op_, point.wait, rank(), point.peer, point.epoch, point.expected, seen});
}

template <typename Ready, typename Seen>
bool Session::wait_until(const Point& point, Ready ready, Seen seen) {
  if (ready()) return true;
  const WaitTimer timer(context_.waited_ns, point.peer);
  for (int spin = 0; spin < kSpins; ++spin) {
    if (ready()) return true;
    cpu_pause();
  }
  return wait_parked(point, ready, seen);
}

template <typename Ready, typename Seen>
bool Session::wait_parked(const Point& point, Ready ready, Seen seen) {
  Doorbell bell(window_.control(rank(), window_.control_layout.doorbell(channel_)));
  const auto deadline = std::chrono::steady_clock::now() + context_.timeout;
  const StrandPool::Asleep asleep;
  for (;;) {
    if (ready()) return true;
    if (poisoned() || std::chrono::steady_clock::now() >= deadline) {
      give_up(point, ErrorKind::kTimeout, seen());
      return false;
    }
    // What the peer sent before it left is here by now.
    if (context_.has_left && context_.has_left(point.peer) && !ready()) {
      give_up(point, ErrorKind::kPeerLeft, seen());
      return false;
    }
    bell.park([&] { return ready() || poisoned(); }, kParkSlice);
  }
}

void Session::ring(int peer) {
  Doorbell(window_.control(peer, window_.control_layout.doorbell(channel_))).ring();
}

void Session::ring_all() {
  for (int step = 0; step < num_peers(); ++step) ring(peer(step));
}

void Session::jitter() {
#if defined(JAX_EP_TEST_HOOKS)
  if (context_.faults->kind.load(std::memory_order_relaxed) != FaultKind::kJitter) return;
  random_ = random_ * 1664525u + 1013904223u;
  if ((random_ >> 24) > 16) return;  // about one message in fifteen
  const auto longest = static_cast<uint32_t>(context_.faults->microseconds.load());
  std::this_thread::sleep_for(std::chrono::microseconds((random_ >> 8) % (longest + 1)));
#endif
}

bool Session::wait_credits(uint64_t epoch) {
  for (int step = 0; step < num_peers(); ++step) {
    const int to = peer(step);
    std::atomic<uint64_t>& credit =
        atomic64(window_.control(rank(), window_.control_layout.credit(channel_, to)));
    auto seen = [&] { return credit.load(std::memory_order_acquire); };
    const Point point{WaitFor::kCredit, to, epoch, epoch - kNumBuffers};
    if (!wait_until(point, [&] { return may_write(epoch, seen()); }, seen)) return false;
  }
  return true;
}

void Session::send_credits(uint64_t epoch) {
  epoch = std::min(epoch, context_.read_through);  // an older start may wait for its done yet
  for (int step = 0; step < num_peers(); ++step) {
    const int to = peer(step);
    // Release: our reads of the epoch come before the peer's writes of epoch + 2.
    atomic64(window_.control(to, window_.control_layout.credit(channel_, rank())))
        .store(epoch, std::memory_order_release);
    ring(to);
  }
}

int64_t Session::tag_offset(uint64_t epoch, int source) const {
  const WindowLayout& layout = window_.layout;
  return channel_ == kDispatchChannel ? layout.dispatch_tag(parity_of(epoch), source)
                                      : layout.combine_tag(parity_of(epoch), source);
}

void Session::send_tags(uint64_t epoch) {
  for (int step = 0; step < num_peers(); ++step) {
    send_word(peer(step), tag_offset(epoch, rank()), epoch_word(epoch, tag_));
  }
}

bool Session::check_tags(uint64_t epoch) {
  for (int step = 0; step < num_peers(); ++step) {
    const int source = peer(step);
    uint64_t word = 0;
    if (!wait_word(source, tag_offset(epoch, source), epoch, WaitFor::kTag, &word)) return false;
    if (word_value(word) != tag_) {
      give_up({WaitFor::kTag, source, epoch, tag_}, ErrorKind::kMismatch, word_value(word));
      return false;
    }
  }
  return true;
}

void Session::send_word(int peer, int64_t offset, uint64_t word) {
  atomic64(window_.data(peer, offset)).store(word, std::memory_order_release);
}

bool Session::wait_word(int peer, int64_t offset, uint64_t epoch, WaitFor wait, uint64_t* word) {
  std::atomic<uint64_t>& slot = atomic64(window_.data(rank(), offset));
  auto ready = [&] { return word_is_of(*word = slot.load(std::memory_order_acquire), epoch); };
  // Records compare epochs: what the word carries besides says nothing to a reader.
  auto seen = [&] { return slot.load(std::memory_order_acquire) >> 32; };
  return wait_until({wait, peer, epoch, epoch}, ready, seen);
}

void Session::send_flag(int peer, int64_t offset, uint64_t epoch, bool arrived) {
  atomic32(window_.data(peer, offset))
      .store(arrival_flag(epoch, arrived), std::memory_order_release);
}

Arrival Session::poll_flag(int64_t offset, uint64_t epoch) const {
  const uint32_t flag = atomic32(window_.data(rank(), offset)).load(std::memory_order_acquire);
  return read_arrival(flag, epoch);
}

bool Session::wait_flag(int peer, int64_t offset, uint64_t epoch, Arrival* arrival) {
  auto ready = [&] { return (*arrival = poll_flag(offset, epoch)) != Arrival::kPending; };
  auto seen = [&] {
    return uint64_t{atomic32(window_.data(rank(), offset)).load(std::memory_order_acquire)};
  };
  return wait_until({WaitFor::kRow, peer, epoch, arrival_flag(epoch, true)}, ready, seen);
}

}  // namespace jax_ep
