#include "data/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

constexpr std::size_t kBuffer = 1 << 20;
constexpr std::string_view kTemporaryMark = ".tmp-";

// Machine and process-id namespace: where a process id has a meaning.
std::string pid_scope() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) std::strcpy(name, "host");
  struct stat info {};
  const bool known = ::stat("/proc/self/ns/pid", &info) == 0;
  return fmt::format("{}-{}-", name, known ? static_cast<std::uint64_t>(info.st_ino) : 0);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[data] {} cannot be opened: {}", path.string(),
                 std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd, &info) == 0 && info.st_size > 0) {
    void* address =
        ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
    if (address != MAP_FAILED) {
      data_ = static_cast<const char*>(address);
      size_ = info.st_size;
    }
  }
  const int code = errno;
  ::close(fd);
  if (data_ == nullptr && info.st_size > 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[data] {} cannot be mapped: {}", path.string(),
                 std::strerror(code));
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), static_cast<std::size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  static std::atomic<int> counter{0};
  temporary_ = path_;
  temporary_ += fmt::format("{}{}{}-{}", kTemporaryMark, pid_scope(), ::getpid(), counter++);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[data] {} cannot be written: {}", temporary_.string(),
                 std::strerror(errno));
  }
  buffer_.reserve(kBuffer);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void AtomicFile::write(const void* data, std::size_t size) {
  const char* bytes = static_cast<const char*>(data);
  size_ += static_cast<std::int64_t>(size);
  while (size > 0) {
    const std::size_t part = std::min(size, kBuffer - buffer_.size());
    buffer_.insert(buffer_.end(), bytes, bytes + part);
    bytes += part;
    size -= part;
    if (buffer_.size() == kBuffer) flush();
  }
}

void AtomicFile::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t wrote = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      TESSERA_FAIL(ErrorKind::kTransient,
                   "[data] writing {} failed: {}; make room or set data.cache_dir to another disk",
                   path_.string(), std::strerror(errno));
    }
    done += static_cast<std::size_t>(wrote);
  }
  buffer_.clear();
}

void AtomicFile::commit() {
  flush();
  const bool flushed = ::fsync(fd_) == 0;
  const int code = errno;
  const bool closed = ::close(std::exchange(fd_, -1)) == 0;
  std::error_code moved;
  if (flushed && closed) std::filesystem::rename(temporary_, path_, moved);
  if (!flushed || !closed || moved) {
    std::error_code ignored;
    std::filesystem::remove(temporary_, ignored);
    TESSERA_FAIL(ErrorKind::kTransient, "[data] {} could not be completed: {}", path_.string(),
                 moved ? moved.message() : std::strerror(code));
  }
}

void remove_abandoned_files(const std::filesystem::path& folder) {
  const std::string ours = std::string(kTemporaryMark) + pid_scope();
  const auto old = std::filesystem::file_time_type::clock::now() - std::chrono::hours(24 * 7);
  std::error_code code;
  for (auto entry = std::filesystem::directory_iterator(folder, code);
       !code && entry != std::filesystem::directory_iterator(); entry.increment(code)) {
    const std::string name = entry->path().filename().string();
    if (name.find(kTemporaryMark) == std::string::npos) continue;
    std::error_code problem;
    bool is_dead = false;
    if (const std::size_t at = name.find(ours); at != std::string::npos) {
      const int pid = std::atoi(name.c_str() + at + ours.size());
      is_dead = pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH;
    } else {
      is_dead = entry->last_write_time(problem) < old && !problem;
    }
    if (is_dead) std::filesystem::remove(entry->path(), problem);
  }
}

std::string read_small_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) TESSERA_FAIL(ErrorKind::kTransient, "[data] {} cannot be read", path.string());
  return std::move(text).str();
}

}  // namespace tessera
