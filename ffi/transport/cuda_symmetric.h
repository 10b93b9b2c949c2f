// Memory at the same place of a heap in every process, through which ranks reach each other that
// cannot map each other's memory. Who has taken it from the heap hands it to the rank that uses it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "transport/window.h"

namespace jax_ep::gpu {

class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  // Of this process's rank. Not zeroed.
  virtual PeerMemory own() const = 0;
  virtual int64_t data_bytes() const = 0;
  virtual int64_t control_bytes() const = 0;

  // A rank's memory as this process's GPU addresses it; null pointers where only puts go, to the
  // processing element that pe() names.
  virtual PeerMemory of_rank(int rank) const = 0;
  virtual int pe(int rank) const = 0;

  // Stores a word in a rank's memory, at the place that `own_word` has in ours.
  virtual void store(int rank, char* own_word, uint32_t value, cudaStream_t stream) const = 0;
  // Waits, on the stream, until all that this GPU has put has arrived.
  virtual void settle(cudaStream_t stream) const = 0;

  // The data may go to another buffer, once all processes have given theirs back; the control block
  // stays ours until the process exits.
  virtual void give_back() = 0;
  // Where something may still write to it: nobody gets it again.
  virtual void keep_for_ever() = 0;
};

}  // namespace jax_ep::gpu
