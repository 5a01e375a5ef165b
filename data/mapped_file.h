// Files mapped for reading, and files written beside their place and moved there when complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/error.h"

namespace tessera {

// Read-only mapping; an empty file maps to nothing. Throws kTransient if the file cannot be mapped.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const char* data() const { return data_; }
  std::int64_t size() const { return size_; }

  template <typename T>
  std::span<const T> as() const {
    CHECK(size_ % static_cast<std::int64_t>(sizeof(T)) == 0, "[data] {} bytes are no whole entries",
          size_);
    return {reinterpret_cast<const T*>(data_), static_cast<std::size_t>(size_) / sizeof(T)};
  }

 private:
  const char* data_ = nullptr;
  std::int64_t size_ = 0;
};

// A file that appears under its name only when it is complete: written under a name of this
// process, flushed to the disk, renamed. Failed writes (disk full) are kTransient errors that name
// the file.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();  // removes what was not committed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();
  std::int64_t size() const { return size_; }

 private:
  void flush();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::int64_t size_ = 0;
  std::vector<char> buffer_;
};

// Removes from `folder` what AtomicFile left there in processes that died: of this machine by their
// process id, of others after a week without a change.
void remove_abandoned_files(const std::filesystem::path& folder);

// The whole of a small file; throws kTransient.
std::string read_small_file(const std::filesystem::path& path);

}  // namespace tessera
