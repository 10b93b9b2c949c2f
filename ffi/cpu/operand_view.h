// What a rank lets the peers in its process read in place while an operation runs, so that messages
// need not carry it (docs/decisions/0005).
#pragma once

#include <cstdint>

namespace jax_ep {

// Who moves rows between ranks.
enum class Payload {
  kWindow,     // the sender, into the receiver's window
  kReference,  // the receiver, out of the sender's operands; messages say which rows
};

// The operands of one rank that peers read. XLA keeps them until the operation is done.
struct OperandView {
  const char* rows;  // what the operation sends: x, y or g
  int64_t num_rows;
  int num_tokens;
  const float* row_weights;  // combine's, null where it has none
  const float* row_scalars;  // likewise
  const int32_t* recv_rows;  // combine's, [R * num_tokens, K]; null for the other operations
  bool by_slot = false;      // combine's rows are one a message, in slot order
  bool in_process = true;    // false: another process has the rank, and nothing above is set

  // Whether what bounds one bounds the other.
  bool same_shape(const OperandView& other) const {
    return num_rows == other.num_rows && num_tokens == other.num_tokens &&
           (row_weights == nullptr) == (other.row_weights == nullptr) &&
           (row_scalars == nullptr) == (other.row_scalars == nullptr) &&
           (recv_rows == nullptr) == (other.recv_rows == nullptr) && by_slot == other.by_slot;
  }
};

}  // namespace jax_ep
