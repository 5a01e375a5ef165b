// A lock that the processes and threads of a job (or of several jobs) share through a file. It
// saves double work and nothing depends on it for correctness: files are written under names of
// their own and renamed, so where a file system has no locks the work is merely done twice.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace tessera {

class JobLock {
 public:
  explicit JobLock(std::filesystem::path path) : path_(std::move(path)) {}
  ~JobLock();  // releases; so does the end of the process, however it ends
  JobLock(const JobLock&) = delete;
  JobLock& operator=(const JobLock&) = delete;

  // Blocks until the lock is held; `waiting` is called several times a second with the note that
  // the holder left (empty if none). Calling it again does nothing.
  void acquire(const std::function<void(const std::string& note)>& waiting);
  bool is_held() const { return held_; }
  // For those who wait: what is being done. At most one line.
  void set_note(const std::string& note);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  bool held_ = false;
};

}  // namespace tessera
