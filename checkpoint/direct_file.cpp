#include "checkpoint/direct_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::string_view kWho = "checkpoint";

[[noreturn]] void fail(const char* what, const std::filesystem::path& path, int error) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] {} {} failed: {}{}", what, path.string(),
               std::generic_category().message(error),
               is_full ? ". Free some space, lower checkpoint.keep_last or set checkpoint.dir to "
                         "another disk"
                       : "");
}

std::uint64_t round_up(std::uint64_t bytes) {
  return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

}  // namespace

void AlignedDelete::operator()(char* data) const noexcept { std::free(data); }

AlignedMemory allocate_aligned(std::size_t bytes) {
  const std::size_t rounded = std::max<std::size_t>(round_up(bytes), kDirectAlignment);
  void* data = std::aligned_alloc(kDirectAlignment, rounded);
  if (data == nullptr) throw std::bad_alloc();
  return AlignedMemory(static_cast<char*>(data));
}

DirectFile::DirectFile(std::filesystem::path path, std::uint64_t bytes, bool direct)
    : path_(std::move(path)), bytes_(bytes), file_(create_for_writing(path_, kWho)) {
  if (direct) {
    const int flags = ::fcntl(file_.get(), F_GETFL);
    is_direct_ = flags >= 0 && ::fcntl(file_.get(), F_SETFL, flags | O_DIRECT) == 0;
  }
  if (bytes == 0) return;
  int result = 0;
  do {
    result = ::fallocate(file_.get(), 0, 0, static_cast<off_t>(is_direct_ ? round_up(bytes) : bytes));
  } while (result != 0 && errno == EINTR);
  // Not every file system can reserve; those that can say so when they are full.
  if (result != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    fail("reserving space for", path_, errno);
  }
}

void DirectFile::write(std::uint64_t offset, const char* data, std::size_t bytes) {
  std::size_t left = is_direct_ ? round_up(bytes) : bytes;
  const std::uint64_t begin = offset;
  while (left > 0) {
    const ssize_t put = ::pwrite(file_.get(), data, left, static_cast<off_t>(offset));
    if (put < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL) {
        // A file system that accepts the flag but not this transfer.
        const int flags = ::fcntl(file_.get(), F_GETFL);
        if (flags >= 0 && (flags & O_DIRECT) != 0 &&
            ::fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) == 0) {
          continue;
        }
      }
      fail("writing", path_, errno);
    }
    if (put == 0) fail("writing", path_, ENOSPC);
    data += put;
    offset += static_cast<std::uint64_t>(put);
    left -= static_cast<std::size_t>(put);
  }
  if (!is_direct_) {
    // Starts the transfer to the disk now rather than all of it in finish(). Best effort.
    (void)::sync_file_range(file_.get(), static_cast<off_t>(begin), static_cast<off_t>(bytes),
                            SYNC_FILE_RANGE_WRITE);
  }
}

void DirectFile::finish() {
  if (::ftruncate(file_.get(), static_cast<off_t>(bytes_)) != 0) fail("cutting", path_, errno);
  sync_file(file_, path_, kWho);
  // What went through the page cache would push out data that training reads.
  (void)::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_DONTNEED);
  file_.reset();
}

void DirectFile::discard() noexcept {
  if (file_.is_open() && ::ftruncate(file_.get(), 0) != 0) {
    // The file is removed with its folder in any case.
  }
  file_.reset();
}

}  // namespace tessera
