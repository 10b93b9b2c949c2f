// Memory that the processes of one host share: an anonymous file, which no name outlives.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace jax_ep {

// Its maker lets others of the same user open it until withdraw(); it is gone when the last process
// that mapped it has unmapped it or has died, however it died. Zeroed at the start.
class HostSegment {
 public:
  // Both throw std::runtime_error with the system's reason.
  static std::unique_ptr<HostSegment> make(int64_t bytes);
  // offer: what the maker's offer() gave. Fails unless it leads to that very memory, of this size.
  static std::unique_ptr<HostSegment> open(const std::string& offer, int64_t bytes);

  HostSegment(const HostSegment&) = delete;
  HostSegment& operator=(const HostSegment&) = delete;
  ~HostSegment();

  char* data() const;  // on a page
  const std::string& offer() const { return offer_; }
  // Nobody opens it from here on.
  void withdraw();

 private:
  HostSegment(int file, int64_t bytes);
  void map();

  int file_;  // -1: withdrawn, or not ours
  int64_t mapped_bytes_;
  char* memory_ = nullptr;
  std::string offer_;
};

}  // namespace jax_ep
