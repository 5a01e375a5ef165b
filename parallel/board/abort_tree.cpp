#include "parallel/board/abort_tree.h"

#include <algorithm>

namespace tessera::board {

void AbortTree::add(const std::shared_ptr<Interruptible>& member) {
  bool is_aborted = false;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(members_, [](const auto& old) { return old.expired(); });
    members_.push_back(member);
    is_aborted = reason_.has_value();
  }
  if (is_aborted) member->interrupt(*reason());
}

bool AbortTree::abort(const std::string& reason) noexcept {
  std::vector<std::weak_ptr<Interruptible>> members;
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return *reason_ == reason;
    reason_ = reason.empty() ? "no reason was given" : reason;
    members = members_;
  }
  if (shared_ != nullptr) shared_->publish(reason);
  for (const auto& member : members) {
    if (const auto alive = member.lock()) alive->interrupt(reason);
  }
  return true;
}

void AbortTree::poll() {
  if (shared_ == nullptr) return;
  if (const auto reason = shared_->read()) abort(*reason);
}

std::optional<std::string> AbortTree::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace tessera::board
