// A pseudo-random order of n things whose i-th element costs O(1) and no memory: a Feistel network
// over the next even power of two, walked along its cycles until it lands below n (Black and
// Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The round function is Philox.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/core/error.h"
#include "engine/core/philox.h"

namespace tessera {

class Permutation {
 public:
  // `key` without its counter: two permutations are independent if their keys differ.
  Permutation(std::int64_t size, const PhiloxKey& key) : size_(size), key_(key) {
    CHECK(size >= 0, "[permutation] of {} things", size);
    const int bits = size <= 1 ? 1 : std::bit_width(static_cast<std::uint64_t>(size - 1));
    half_bits_ = (bits + 1) / 2;
    mask_ = (std::uint64_t{1} << half_bits_) - 1;
  }

  std::int64_t size() const { return size_; }

  std::int64_t operator()(std::int64_t index) const {
    CHECK(index >= 0 && index < size_, "[permutation] element {} of {}", index, size_);
    auto value = static_cast<std::uint64_t>(index);
    // The domain is less than four times as large: a few walks at most.
    do {
      value = encrypt(value);
    } while (value >= static_cast<std::uint64_t>(size_));
    return static_cast<std::int64_t>(value);
  }

 private:
  static constexpr std::uint64_t kRounds = 8;

  std::uint64_t encrypt(std::uint64_t value) const {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask_;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = left ^ (philox(key_, (round << 32) | right).v[0] & mask_);
      left = right;
      right = mixed;
    }
    return (left << half_bits_) | right;
  }

  std::int64_t size_;
  PhiloxKey key_;
  int half_bits_;
  std::uint64_t mask_;
};

}  // namespace tessera
