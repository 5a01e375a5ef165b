// AbortTree: one per world and process. Every group that was split from the world hangs on it, so
// that an abort of one group ends the waits in all of them.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::board {

// Something that ranks wait in.
class Interruptible {
 public:
  virtual ~Interruptible() = default;
  // Ends present and future waits.
  virtual void interrupt(const std::string& reason) noexcept = 0;
};

// Where an abort reaches other processes.
class SharedReason {
 public:
  virtual ~SharedReason() = default;
  virtual void publish(const std::string& reason) noexcept = 0;
  virtual std::optional<std::string> read() const = 0;
};

class AbortTree {
 public:
  // `shared` may be null: all ranks are threads of this process.
  explicit AbortTree(std::shared_ptr<SharedReason> shared = nullptr) : shared_(std::move(shared)) {}

  // Waits in `member` from now on end with the tree; at once if it is already aborted.
  void add(const std::shared_ptr<Interruptible>& member);
  // Returns whether `reason` is the one that counts (the first wins).
  bool abort(const std::string& reason) noexcept;
  // Takes over an abort that another process published.
  void poll();
  std::optional<std::string> reason() const;

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> reason_;
  std::vector<std::weak_ptr<Interruptible>> members_;
  std::shared_ptr<SharedReason> shared_;  // the world's board, which its groups may outlive
};

}  // namespace tessera::board
