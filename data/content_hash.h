// A 128-bit hash that tells file contents and settings apart in cache keys. It guards against
// accident, not against an attacker.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tessera {

class ContentHash {
 public:
  // Each call is framed by its length: ("ab", "c") and ("a", "bc") differ.
  ContentHash& add(std::string_view bytes) {
    add(static_cast<std::uint64_t>(bytes.size()));
    while (bytes.size() >= 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes.data(), 8);
      add(word);
      bytes.remove_prefix(8);
    }
    if (!bytes.empty()) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data(), bytes.size());
      add(word);
    }
    return *this;
  }
  ContentHash& add(std::uint64_t word) {
    a_ = mix(a_ ^ word);
    b_ = mix(b_ + word * 0xD6E8FEB86659FD93ull);
    return *this;
  }
  ContentHash& add(std::int64_t word) { return add(static_cast<std::uint64_t>(word)); }

  std::string hex() const {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::uint64_t half : {mix(a_ + b_), mix(b_ ^ (a_ >> 1))}) {
      for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(half >> shift) & 15];
    }
    return text;
  }

 private:
  // splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014).
  static std::uint64_t mix(std::uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  std::uint64_t a_ = 0x6A09E667F3BCC908ull;  // fractional bits of sqrt(2) and sqrt(3)
  std::uint64_t b_ = 0xBB67AE8584CAA73Bull;
};

}  // namespace tessera
