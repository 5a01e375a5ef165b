#include "checkpoint/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "engine/core/error.h"

namespace tessera {
namespace {

std::string_view advice_for(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return ". Free some space or write to another disk";
    case EROFS:
    case EACCES:
    case EPERM:
      return ". Choose a folder that this user can write to";
    case EMFILE:
    case ENFILE:
      return ". Raise the limit of open files (ulimit -n)";
    default:
      return "";
  }
}

[[noreturn]] void fail(std::string_view who, std::string_view what,
                       const std::filesystem::path& path, int error) {
  TESSERA_FAIL(ErrorKind::kTransient, "[{}] {} {} failed: {}{}", who, what, path.string(),
               std::generic_category().message(error), advice_for(error));
}

// One call moves at most this much: Linux caps a transfer just below 2 GiB.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;

}  // namespace

FileHandle::~FileHandle() { reset(); }

FileHandle::FileHandle(FileHandle&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  if (this != &other) {
    reset();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void FileHandle::reset() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

FileHandle open_for_reading(const std::filesystem::path& path, std::string_view who) {
  FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) {
    const int error = errno;
    const bool users_mistake =
        error == ENOENT || error == ENOTDIR || error == EACCES || error == ELOOP;
    CHECK_USER(!users_mistake, "[{}] cannot read {}: {}", who, path.string(),
               std::generic_category().message(error));
    fail(who, "opening", path, error);
  }
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail(who, "looking at", path, errno);
  CHECK_USER(S_ISREG(status.st_mode), "[{}] {} is {}, wanted a file", who, path.string(),
             S_ISDIR(status.st_mode) ? "a folder" : "not a regular file");
  return file;
}

FileHandle create_for_writing(const std::filesystem::path& path, std::string_view who) {
  FileHandle file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.is_open()) fail(who, "creating", path, errno);
  return file;
}

std::uint64_t file_size(const FileHandle& file, const std::filesystem::path& path,
                        std::string_view who) {
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail(who, "looking at", path, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void read_at(const FileHandle& file, std::uint64_t offset, void* destination, std::size_t bytes,
             const std::filesystem::path& path, std::string_view who) {
  auto* out = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(file.get(), out, std::min(bytes, kLargestTransfer), static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      fail(who, "reading", path, errno);
    }
    if (got == 0) {
      TESSERA_FAIL(ErrorKind::kTransient,
                   "[{}] {} ends at byte {} although {} more are due: it was cut while in use", who,
                   path.string(), offset, bytes);
    }
    out += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

void write_all(const FileHandle& file, const void* data, std::size_t bytes,
               const std::filesystem::path& path, std::string_view who) {
  const auto* in = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(file.get(), in, std::min(bytes, kLargestTransfer));
    if (put < 0) {
      if (errno == EINTR) continue;
      fail(who, "writing", path, errno);
    }
    in += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

void sync_file(const FileHandle& file, const std::filesystem::path& path, std::string_view who) {
  if (::fsync(file.get()) != 0) fail(who, "flushing", path, errno);
}

void sync_folder(const std::filesystem::path& folder, std::string_view who) {
  const std::filesystem::path path = folder.empty() ? "." : folder;
  const FileHandle handle(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!handle.is_open()) fail(who, "opening", path, errno);
  // Some network file systems cannot flush a folder and say EINVAL; their rename is already
  // durable.
  if (::fsync(handle.get()) != 0 && errno != EINVAL) fail(who, "flushing", path, errno);
}

void rename_file(const std::filesystem::path& from, const std::filesystem::path& to,
                 std::string_view who) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(who, "putting in place", to, errno);
}

void remove_file(const std::filesystem::path& path, std::string_view who) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail(who, "removing", path, errno);
}

void create_folders(const std::filesystem::path& folder, std::string_view who) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(who, "creating the folder", folder, error.value());
}

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  return path.parent_path() /
         ("." + path.filename().string() + ".tmp-" + std::to_string(::getpid()));
}

void replace_file(const std::filesystem::path& path, std::string_view text, std::string_view who) {
  const std::filesystem::path temporary = temporary_name(path);
  try {
    const FileHandle file = create_for_writing(temporary, who);
    write_all(file, text.data(), text.size(), temporary, who);
    sync_file(file, temporary, who);
    rename_file(temporary, path, who);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_folder(path.parent_path(), who);
}

std::string read_text_file(const std::filesystem::path& path, std::uint64_t limit,
                           std::string_view who) {
  const FileHandle file = open_for_reading(path, who);
  const std::uint64_t bytes = file_size(file, path, who);
  CHECK_USER(bytes <= limit, "[{}] {} has {} bytes, wanted at most {}", who, path.string(), bytes,
             limit);
  std::string text(bytes, '\0');
  read_at(file, 0, text.data(), text.size(), path, who);
  return text;
}

}  // namespace tessera
