// What the parts of protocol_stress share: poisoned outputs, operands on loan, and findings.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "stress_world.h"

namespace jax_ep::stress {

constexpr char kPoison = static_cast<char>(0xA5);

template <typename T>
std::vector<T> poisoned(int64_t size) {
  std::vector<T> out(size);
  if (size > 0) std::memset(out.data(), kPoison, size * sizeof(T));
  return out;
}

// An operand as XLA lends it: filled before the operation, freed when it is done. Nobody may read
// it earlier or later.
template <typename T>
class Lent {
 public:
  Lent(const T* from, int64_t size) : from_(from), copy_(poisoned<T>(size)) {}
  void fill() { std::copy_n(from_, copy_.size(), copy_.data()); }
  void take_back() { std::vector<T>().swap(copy_); }
  const T* data() const { return copy_.data(); }

 private:
  const T* from_;
  std::vector<T> copy_;
};

inline bool all_bytes(const char* row, int64_t bytes, char value) {
  return std::all_of(row, row + bytes, [&](char byte) { return byte == value; });
}

// Equal as bits; NaNs are all alike.
inline bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

class Findings {
 public:
  template <typename... Parts>
  void expect(bool holds, const Parts&... parts) {
    if (holds || !first_.empty()) return;
    std::ostringstream text;
    (text << ... << parts);
    first_ = text.str();
  }
  void expect_row(const World& world, const char* row, const std::vector<double>& expected,
                  const char* name, int64_t index) {
    for (int64_t j = 0; j < world.hidden; ++j) {
      const double seen = get(world.row_type, row, j);
      expect(same(seen, expected[j]), name, "[", index, "][", j, "] is ", seen, ", not ",
             expected[j]);
    }
  }
  // A row that no token fills: zero, or left alone where that is allowed.
  void expect_empty(const World& world, const std::vector<char>& rows, int64_t row, bool written,
                    const char* name) {
    const int64_t bytes = world.shape.row_bytes;
    expect(all_bytes(&rows[row * bytes], bytes, written ? 0 : kPoison), name, " row ", row,
           written ? " is not zero" : " was written");
  }
  const std::string& first() const { return first_; }

 private:
  std::string first_;
};

inline int64_t end_of_groups(const Round& round, int rank) {
  int64_t end = 0;
  for (int32_t size : round.group_sizes[rank]) end += size;
  return end;
}

}  // namespace jax_ep::stress
