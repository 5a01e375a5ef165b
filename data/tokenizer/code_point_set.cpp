#include "data/tokenizer/code_point_set.h"

#include <algorithm>

namespace tessera {

void CodePointSet::add(char32_t first, char32_t last) {
  ranges_.push_back({first, last});
  normalise();
}

void CodePointSet::add(std::span<const CodePointRange> ranges) {
  ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
  normalise();
}

void CodePointSet::intersect(const CodePointSet& other) {
  std::vector<CodePointRange> both;
  auto a = ranges_.begin();
  auto b = other.ranges_.begin();
  while (a != ranges_.end() && b != other.ranges_.end()) {
    const char32_t first = std::max(a->first, b->first);
    const char32_t last = std::min(a->last, b->last);
    if (first <= last) both.push_back({first, last});
    if (a->last < b->last) {
      ++a;
    } else {
      ++b;
    }
  }
  ranges_ = std::move(both);
  normalise();
}

void CodePointSet::remove(const CodePointSet& other) {
  CodePointSet rest = other;
  rest.complement();
  intersect(rest);
}

void CodePointSet::complement() {
  std::vector<CodePointRange> gaps;
  char32_t next = 0;
  for (const CodePointRange& range : ranges_) {
    if (range.first > next) gaps.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= 0x10FFFF) gaps.push_back({next, 0x10FFFF});
  ranges_ = std::move(gaps);
  normalise();
}

void CodePointSet::normalise() {
  std::sort(ranges_.begin(), ranges_.end(),
            [](const CodePointRange& a, const CodePointRange& b) { return a.first < b.first; });
  std::vector<CodePointRange> merged;
  for (const CodePointRange& range : ranges_) {
    if (!merged.empty() && range.first <= merged.back().last + 1) {
      merged.back().last = std::max(merged.back().last, range.last);
    } else {
      merged.push_back(range);
    }
  }
  ranges_ = std::move(merged);
  ascii_[0] = ascii_[1] = 0;
  for (const CodePointRange& range : ranges_) {
    for (char32_t c = range.first; c <= range.last && c < 128; ++c) {
      ascii_[c >> 6] |= std::uint64_t{1} << (c & 63);
    }
  }
}

bool CodePointSet::contains_beyond_ascii(char32_t c) const {
  const auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), c,
      [](char32_t value, const CodePointRange& range) { return value < range.first; });
  return after != ranges_.begin() && c <= std::prev(after)->last;
}

}  // namespace tessera
