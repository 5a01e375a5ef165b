// A set of code points as sorted ranges, with the algebra of character classes and fast tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

struct CodePointRange {
  char32_t first;
  char32_t last;  // inclusive
};

class CodePointSet {
 public:
  CodePointSet() = default;
  explicit CodePointSet(std::span<const CodePointRange> ranges) { add(ranges); }

  void add(char32_t first, char32_t last);
  void add(std::span<const CodePointRange> ranges);
  void add(const CodePointSet& other) { add(other.ranges()); }
  void intersect(const CodePointSet& other);
  void remove(const CodePointSet& other);
  void complement();

  bool contains(char32_t c) const {
    if (c < 128) return (ascii_[c >> 6] >> (c & 63) & 1) != 0;
    return contains_beyond_ascii(c);
  }
  bool empty() const { return ranges_.empty(); }
  std::span<const CodePointRange> ranges() const { return ranges_; }

 private:
  void normalise();
  bool contains_beyond_ascii(char32_t c) const;

  std::vector<CodePointRange> ranges_;  // sorted, disjoint, not adjacent
  std::uint64_t ascii_[2] = {0, 0};     // the same set for code points below 128
};

}  // namespace tessera
