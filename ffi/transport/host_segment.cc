#include "transport/host_segment.h"

#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace jax_ep {

#if defined(__linux__)

namespace {

constexpr int64_t kHeaderBytes = 4096;  // of the segment's own, in front of data()
constexpr int kNonceBytes = 16;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::string to_hex(const char* bytes, int count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

}  // namespace

char* HostSegment::data() const { return memory_ + kHeaderBytes; }

HostSegment::HostSegment(int file, int64_t bytes)
    : file_(file), mapped_bytes_(kHeaderBytes + bytes) {}

HostSegment::~HostSegment() {
  if (memory_ != nullptr) munmap(memory_, mapped_bytes_);
  withdraw();
}

void HostSegment::withdraw() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

void HostSegment::map() {
  void* memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) fail("mapping " + std::to_string(mapped_bytes_) + " shared bytes");
  memory_ = static_cast<char*>(memory);
}

std::unique_ptr<HostSegment> HostSegment::make(int64_t bytes) {
  const int file = memfd_create("jax_ep", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) fail("memory shared between processes");
  std::unique_ptr<HostSegment> segment(new HostSegment(file, bytes));
  if (ftruncate(file, segment->mapped_bytes_) != 0) {
    fail("reserving " + std::to_string(segment->mapped_bytes_) + " shared bytes");
  }
  // Who maps it may trust its size: a file that shrinks kills those who touch what is gone.
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("fixing the size of shared memory");
  }
  segment->map();
  std::random_device random;
  for (int i = 0; i < kNonceBytes; ++i) segment->memory_[i] = static_cast<char>(random());
  std::ostringstream offer;
  offer << getpid() << ' ' << file << ' ' << to_hex(segment->memory_, kNonceBytes);
  segment->offer_ = offer.str();
  return segment;
}

std::unique_ptr<HostSegment> HostSegment::open(const std::string& offer, int64_t bytes) {
  std::istringstream parts(offer);
  long pid = 0;
  int number = 0;
  std::string nonce;
  if (!(parts >> pid >> number >> nonce)) throw std::runtime_error("the offer is malformed");
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  // Not blocking: where the offer comes from another host, anything may have this name here.
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) fail("opening the shared memory of process id " + std::to_string(pid));
  std::unique_ptr<HostSegment> segment(new HostSegment(file, bytes));
  struct stat status{};
  const bool fits = fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                    status.st_uid == geteuid() && status.st_size == segment->mapped_bytes_ &&
                    (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
  if (fits) segment->map();
  if (!fits || to_hex(segment->memory_, kNonceBytes) != nonce) {
    throw std::runtime_error(path + " is not the shared memory that was offered");
  }
  segment->withdraw();
  return segment;
}

#else

HostSegment::HostSegment(int file, int64_t bytes) : file_(file), mapped_bytes_(bytes) {}
HostSegment::~HostSegment() = default;
char* HostSegment::data() const { return memory_; }
void HostSegment::withdraw() {}
void HostSegment::map() {}

std::unique_ptr<HostSegment> HostSegment::make(int64_t) {
  throw std::runtime_error("processes share memory on Linux only");
}
std::unique_ptr<HostSegment> HostSegment::open(const std::string&, int64_t) { return make(0); }

#endif

}  // namespace jax_ep
