#include "data/job_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {

JobLock::~JobLock() {
  if (fd_ >= 0) ::close(fd_);  // closing releases the lock
}

void JobLock::acquire(const std::function<void(const std::string& note)>& waiting) {
  if (held_) return;
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[data] the lock {} cannot be opened: {}", path_.string(),
                 std::strerror(errno));
  }
  // flock belongs to the open file, so it also keeps thread ranks of one process apart.
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      log::warning("[data] {} cannot be locked ({}); processes may prepare the same data twice",
                   path_.string(), std::strerror(errno));
      break;
    }
    char note[512] = {};
    const ssize_t size = ::pread(fd_, note, sizeof(note) - 1, 0);
    if (waiting) waiting(size > 0 ? std::string(note, static_cast<std::size_t>(size)) : "");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  held_ = true;
  set_note("");
}

void JobLock::set_note(const std::string& note) {
  if (!held_) return;
  // A note is a courtesy: a full disk must not end the work that goes on elsewhere.
  if (::pwrite(fd_, note.data(), note.size(), 0) >= 0) {
    [[maybe_unused]] const int code = ::ftruncate(fd_, static_cast<off_t>(note.size()));
  }
}

}  // namespace tessera
