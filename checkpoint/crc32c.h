// CRC-32C (Castagnoli polynomial, as in iSCSI, RFC 3720 appendix B.4): finds every flipped bit and every
// burst of up to 32 bits. Uses the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

// The checksum of `bytes` bytes; with the checksum of what came before as `previous`, that of both.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t previous = 0);

// The same from tables, without the instruction. For tests and other processors.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t previous = 0);

// Eight lower-case hexadecimal digits.
std::string crc32c_text(std::uint32_t checksum);

}  // namespace tessera
