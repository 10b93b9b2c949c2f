#include "cpu/row_math.h"

namespace jax_ep {

namespace row_math_baseline {
extern const RowMath kRowMath;
}
#if defined(JAX_EP_HAS_AVX2)
namespace row_math_avx2 {
extern const RowMath kRowMath;
}
#endif

const RowMath& row_math() {
#if defined(JAX_EP_HAS_AVX2)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return row_math_avx2::kRowMath;
#endif
  return row_math_baseline::kRowMath;
}

}  // namespace jax_ep
