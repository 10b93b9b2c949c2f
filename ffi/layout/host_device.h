// Marks functions that the host compiler and nvcc compile from the same text.
#pragma once

#if defined(__CUDACC__)
#define JAX_EP_HD __host__ __device__
#else
#define JAX_EP_HD
#endif
