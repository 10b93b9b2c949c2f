// A CUDA runtime in host memory, for the host side of the CUDA backend on machines without a GPU.
#pragma once

#include <cstdint>

// What a test decides of the machine, and sees of it.
struct FakeCuda {
  int num_devices = 2;
  bool peers_reachable = true;
  int64_t memory_bytes = int64_t{1} << 40;  // of all devices together
  int64_t used_bytes = 0;
  int mapped = 0;   // allocations, by other processes
  int busy_ms = 0;  // how long a device takes to become idle
};
FakeCuda& fake_cuda();
