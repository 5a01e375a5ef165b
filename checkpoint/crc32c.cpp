#include "checkpoint/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tessera {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected

// tables[k][b]: the effect of byte b followed by k zero bytes.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) != 0 ? kPolynomial : 0u);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xffu];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t load(const unsigned char* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__) || defined(__aarch64__)

// Product of two polynomials modulo the CRC's, in reflected bit order (bit 31 is x^0).
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t mask = 1u << 31; mask != 0; mask >>= 1) {
    if ((a & mask) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1u) != 0 ? kPolynomial : 0u);
  }
  return product;
}

// x^(8 * bytes): what a CRC is multiplied by when that many zero bytes follow.
constexpr std::uint32_t shift_of(std::uint64_t bytes) {
  std::uint32_t result = 1u << 31;
  std::uint32_t square = 1u << 23;  // x^8
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1u) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

// The instruction takes three cycles but one can start in each, so three lanes run side by side.
constexpr std::size_t kLane = std::size_t{32} << 10;
constexpr std::uint32_t kShiftOneLane = shift_of(kLane);
constexpr std::uint32_t kShiftTwoLanes = shift_of(2 * kLane);

#if defined(__x86_64__)
#define TESSERA_CRC_TARGET __attribute__((target("sse4.2")))
TESSERA_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
TESSERA_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) {
  return _mm_crc32_u8(crc, byte);
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
#define TESSERA_CRC_TARGET __attribute__((target("+crc")))
TESSERA_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint64_t word) {
  return __crc32cd(crc, word);
}
TESSERA_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) {
  return __crc32cb(crc, byte);
}
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

TESSERA_CRC_TARGET std::uint32_t crc_by_instruction(const unsigned char* data, std::size_t bytes,
                                                    std::uint32_t crc) {
  while (bytes >= 3 * kLane) {
    std::uint32_t first = crc;
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      first = step8(first, load(data + i));
      second = step8(second, load(data + kLane + i));
      third = step8(third, load(data + 2 * kLane + i));
    }
    crc = multiply(first, kShiftTwoLanes) ^ multiply(second, kShiftOneLane) ^ third;
    data += 3 * kLane;
    bytes -= 3 * kLane;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) crc = step8(crc, load(data));
  for (; bytes > 0; ++data, --bytes) crc = step1(crc, *data);
  return crc;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t previous) {
  const auto* in = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~previous;
  for (; bytes >= 8; in += 8, bytes -= 8) {
    const std::uint64_t word = load(in) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xffu];
  }
  for (; bytes > 0; ++in, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *in) & 0xffu];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t previous) {
#if defined(__x86_64__) || defined(__aarch64__)
  static const bool instruction = has_instruction();
  if (instruction) {
    return ~crc_by_instruction(static_cast<const unsigned char*>(data), bytes, ~previous);
  }
#endif
  return crc32c_portable(data, bytes, previous);
}

std::string crc32c_text(std::uint32_t checksum) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(8, '0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = kDigits[(checksum >> (28 - 4 * i)) & 0xfu];
  return text;
}

}  // namespace tessera
