// Error records as sentences (host only).
#pragma once

#include <string>

#include "protocol/error_record.h"

namespace jax_ep {

// "EpTimeoutError: dispatch, epoch 7: rank 2 waited 20 s for ..." — the name before the colon is
// the Python exception that buffer.check() raises for it.
std::string describe(const ErrorRecord& record, double timeout_s);

// For a rank that stopped since another one had given up.
std::string describe_follower(const ErrorRecord& record, const ErrorRecord& first,
                              double timeout_s);

}  // namespace jax_ep
