#include "protocol/error_text.h"

#include <sstream>

namespace jax_ep {

namespace {

constexpr const char* kReset =
    " All ranks must run the same operations in the same order. buffer.check() raises this error "
    "in "
    "Python; buffer.reset() makes the buffer usable again.";

void describe_place(std::ostream& text, const ErrorRecord& record) {
  text << op_name(record.op) << ", epoch " << record.epoch << ": rank " << record.rank;
}

// Of GPUs, whose kernels find out by themselves: there it is an error like others, and dones keep
// the order of their starts.
std::string describe_out_of_turn(const ErrorRecord& record) {
  const bool done = record.expected == record.epoch;
  const std::string text = done ? unknown_start_text(record.op, static_cast<uint32_t>(record.seen))
                                : open_start_text(record.op, record.epoch, record.expected + 1);
  return text +
         " On GPUs dones come in the order of their starts, and a whole operation comes "
         "when no start is open." +
         kReset;
}

}  // namespace

std::string describe(const ErrorRecord& record, double timeout_s) {
  if (record.kind == ErrorKind::kUsage) return describe_out_of_turn(record);
  std::ostringstream text;
  if (record.kind == ErrorKind::kMismatch) {
    text << "EpMismatchError: ";
    describe_place(text, record);
    if (record.wait == WaitFor::kStart) {
      text << " of the buffer is rank " << static_cast<int64_t>(record.seen)
           << " in the mesh of the function, which orders the devices otherwise. Use the mesh that "
              "the Buffer was made with."
           << kReset;
      return text.str();
    }
    text << " runs another operation (or other shapes) than rank " << record.peer << std::hex
         << " (tag 0x" << record.expected << " here, 0x" << record.seen << " there)." << kReset;
    return text.str();
  }
  text << "EpTimeoutError: ";
  describe_place(text, record);
  if (record.kind == ErrorKind::kPeerLeft) {
    text << " waits for rank " << record.peer << " (" << wait_name(record.wait)
         << "), whose process will send nothing more." << kReset;
    return text.str();
  }
  text << " waited " << timeout_s << " s for rank " << record.peer << " (" << wait_name(record.wait)
       << "; expected " << record.expected << ", seen " << record.seen << ").";
  if (record.wait == WaitFor::kStart) {
    text << " Either that rank is late or runs another program, or more than 32 executions are "
            "queued, which XLA:CPU cannot carry: call block_until_ready at least every 32 steps.";
  }
  text << kReset;
  return text.str();
}

std::string describe_follower(const ErrorRecord& record, const ErrorRecord& first,
                              double timeout_s) {
  std::ostringstream text;
  text << (first.kind == ErrorKind::kMismatch ? "EpMismatchError: " : "EpTimeoutError: ");
  describe_place(text, record);
  text << " stopped waiting for rank " << record.peer << " (" << wait_name(record.wait)
       << "), since rank " << first.rank << " had given up: " << describe(first, timeout_s);
  return text.str();
}

std::string open_start_text(OpKind op, uint64_t epoch, uint64_t oldest) {
  std::ostringstream text;
  text << "EpUsageError: " << op_name(op) << ", epoch " << epoch
       << ": two operations of a kind may be on their way at a time, and the start of epoch "
       << oldest
       << " has had no done yet. Call its done before this operation (after= orders operations "
          "that share no data); after an execution that failed, buffer.reset() forgets its starts.";
  return text.str();
}

std::string unknown_start_text(OpKind op, uint32_t epoch) {
  std::ostringstream text;
  text << "EpUsageError: " << op_name(op) << " done: its pending names epoch " << epoch
       << ", which is not on its way: it was done before, or buffer.reset() has forgotten it, or "
          "ranks named different ones. Pass each pending to one done, once.";
  return text.str();
}

}  // namespace jax_ep
