#include "checkpoint/crc32c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace tessera {
namespace {

std::vector<unsigned char> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// RFC 3720, appendix B.4, and the usual check value.
TEST(Crc32c, KnownValues) {
  unsigned char data[32] = {};
  EXPECT_EQ(crc32c(data, 32), 0x8a9136aau);
  std::memset(data, 0xff, 32);
  EXPECT_EQ(crc32c(data, 32), 0x62a8ab43u);
  for (unsigned char i = 0; i < 32; ++i) data[i] = i;
  EXPECT_EQ(crc32c(data, 32), 0x46dd794eu);
  for (unsigned char i = 0; i < 32; ++i) data[i] = static_cast<unsigned char>(31 - i);
  EXPECT_EQ(crc32c(data, 32), 0x113fdb5cu);
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
  EXPECT_EQ(crc32c_text(0x0a00000fu), "0a00000f");
}

TEST(Crc32c, InstructionAndTablesAgree) {
  const std::vector<unsigned char> bytes = random_bytes(400'000, 1);
  for (const std::size_t size : {1ul, 7ul, 8ul, 9ul, 4096ul, 98'303ul, 98'304ul, 98'305ul, 300'001ul}) {
    for (const std::size_t start : {0ul, 1ul, 5ul}) {
      EXPECT_EQ(crc32c(bytes.data() + start, size), crc32c_portable(bytes.data() + start, size))
          << size << " from " << start;
    }
  }
}

TEST(Crc32c, ContinuesWhereItStopped) {
  const std::vector<unsigned char> bytes = random_bytes(250'000, 2);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const std::size_t cut : {0ul, 1ul, 1000ul, 100'003ul, 250'000ul}) {
    const std::uint32_t first = crc32c(bytes.data(), cut);
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, first), whole);
    EXPECT_EQ(crc32c_portable(bytes.data() + cut, bytes.size() - cut, first), whole);
  }
}

TEST(Crc32c, EveryFlippedBitChangesIt) {
  std::vector<unsigned char> bytes = random_bytes(509, 3);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    EXPECT_NE(crc32c(bytes.data(), bytes.size()), whole);
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace tessera
