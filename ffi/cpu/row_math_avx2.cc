// Compiled with AVX2, FMA and F16C (see CMakeLists.txt); entered only where the CPU has them.
#define JAX_EP_ROW_MATH_NAMESPACE row_math_avx2
#include "cpu/row_math_impl.h"
