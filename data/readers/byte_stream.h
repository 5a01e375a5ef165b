// Files as streams of bytes: plain, gzip and Zstandard, told apart by their first bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

namespace tessera {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // Up to `size` bytes; 0 only at the end. Throws kTransient for failed reads and kUser for damaged
  // or truncated compressed data.
  virtual std::size_t read(char* out, std::size_t size) = 0;
  // Bytes of the file consumed so far: for progress, also of compressed files.
  virtual std::int64_t stored_position() const = 0;
};

enum class Compression { kNone, kGzip, kZstd };

// By the magic number; a file that cannot be opened is a kUser error.
Compression detect_compression(const std::filesystem::path& path);

// `begin` (of plain files only) is the first byte that is read.
std::unique_ptr<ByteStream> open_stream(const std::filesystem::path& path, std::int64_t begin = 0);

}  // namespace tessera
