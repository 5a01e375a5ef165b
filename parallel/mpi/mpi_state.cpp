#include "parallel/mpi/mpi_state.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/core/error.h"

namespace tessera::mpi {
namespace {

constexpr int kTagsPerGroup = 4;

}  // namespace

MpiState::MpiState(MPI_Comm world) : world_(world) {
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &size_);
  MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN);
  int* limit = nullptr;
  int is_set = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &is_set);
  if (is_set != 0) largest_tag_ = *limit;
  listen();
}

int MpiState::tag(int group, Tag kind) const {
  return 1 + group * kTagsPerGroup + static_cast<int>(kind);
}

void MpiState::use_group(int number) {
  CHECK(number < (largest_tag_ - kTagsPerGroup) / kTagsPerGroup,
        "[mpi] {} groups are more than the MPI library has tags for", number);
  next_group_ = std::max(next_group_, number + 1);
}

void MpiState::listen() {
  MPI_Irecv(heard_.data(), static_cast<int>(kReasonBytes), MPI_CHAR, MPI_ANY_SOURCE, kAbortTag,
            world_, &listening_);
}

bool MpiState::keep_first(const std::string& reason) {
  const std::lock_guard lock(reason_mutex_);
  if (reason_) return *reason_ == reason;
  reason_ = reason.empty() ? "no reason was given" : reason;
  return true;
}

std::optional<std::string> MpiState::reason() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

bool MpiState::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(reason_mutex_);
    if (reason_) return *reason_ == reason;
    reason_ = reason.empty() ? "no reason was given" : reason;
  }
  std::vector<MPI_Request> requests;
  {
    const std::lock_guard lock(mpi_mutex_);
    std::strncpy(told_.data(), reason.c_str(), kReasonBytes - 1);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      MPI_Isend(told_.data(), static_cast<int>(kReasonBytes), MPI_CHAR, r, kAbortTag, world_,
                &request);
      requests.push_back(request);
    }
  }
  // A short while for what the library has not sent at once; peers that are gone are not waited
  // for.
  for (int i = 0; i < 100; ++i) {
    int is_done = 0;
    {
      const std::lock_guard lock(mpi_mutex_);
      MPI_Testall(static_cast<int>(requests.size()), requests.data(), &is_done,
                  MPI_STATUSES_IGNORE);
    }
    if (is_done != 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void MpiState::poll_abort() {
  if (listening_ == MPI_REQUEST_NULL) return;
  int is_done = 0;
  if (MPI_Test(&listening_, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_done == 0) return;
  heard_.back() = '\0';
  keep_first(heard_.data());
  // The other ranks' reasons may still come; they must find a receive.
  listen();
}

void MpiState::finish() {
  const std::lock_guard lock(mpi_mutex_);
  MPI_Cancel(&listening_);
  MPI_Wait(&listening_, MPI_STATUS_IGNORE);
}

std::string words_of(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

}  // namespace tessera::mpi
