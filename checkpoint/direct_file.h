// A file written in large blocks past the page cache (O_DIRECT) where the file system can, through it
// otherwise. Reading likewise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "checkpoint/posix_file.h"

namespace tessera {

// What direct I/O asks of addresses, offsets and lengths.
inline constexpr std::size_t kDirectAlignment = 4096;

// Host memory aligned for direct I/O.
struct AlignedDelete {
  void operator()(char* data) const noexcept;
};
using AlignedMemory = std::unique_ptr<char[], AlignedDelete>;
AlignedMemory allocate_aligned(std::size_t bytes);

// Blocks may be written by many threads at once. Errors are kTransient with path, reason and advice.
class DirectFile {
 public:
  // Creates or truncates the file and reserves `bytes`, so that a full disk is known at once.
  DirectFile(std::filesystem::path path, std::uint64_t bytes, bool direct = true);

  // `offset` is a multiple of kDirectAlignment and so is the address; behind `bytes` the memory must
  // be readable up to the next multiple (its content does not matter).
  void write(std::uint64_t offset, const char* data, std::size_t bytes);
  // Cuts the file to its size, flushes it to the disk and closes it.
  void finish();
  // Closes without flushing and frees what was reserved.
  void discard() noexcept;

  bool is_direct() const { return is_direct_; }

 private:
  std::filesystem::path path_;
  std::uint64_t bytes_ = 0;
  FileHandle file_;
  bool is_direct_ = false;
};

}  // namespace tessera
