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

// A start or a whole operation would take an epoch whose buffer an open start still holds.
std::string open_start_text(OpKind op, uint64_t epoch, uint64_t oldest);

// A done names a start that is not open.
std::string unknown_start_text(OpKind op, uint32_t epoch);

}  // namespace jax_ep
