#define JAX_EP_ROW_MATH_NAMESPACE row_math_baseline
#include "cpu/row_math_impl.h"
