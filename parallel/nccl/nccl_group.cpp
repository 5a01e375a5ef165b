#if defined(TESSERA_WITH_NCCL)

#include "parallel/nccl/nccl_group.h"

#include <chrono>
#include <utility>

#include "engine/core/log.h"
#include "engine/device/cuda/cuda_check.h"

namespace tessera::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// A call that is under way when an abort comes gets this long to return before its communicator is freed.
constexpr std::chrono::seconds kCallGrace(2);
constexpr std::chrono::microseconds kNap(50);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

NcclGroup::NcclGroup(ncclComm_t comm, int device, int rank, int size, std::string name,
                     std::shared_ptr<board::AbortTree> tree, double timeout_seconds)
    : comm_(comm),
      device_(device),
      rank_(rank),
      size_(size),
      name_(std::move(name)),
      tree_(std::move(tree)),
      timeout_seconds_(timeout_seconds) {
  CUDA_CHECK(cudaSetDevice(device_));
  CUDA_CHECK(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming));
}

NcclGroup::~NcclGroup() {
  cudaSetDevice(device_);
  // The communicator may go only when its kernels are done, which a lost peer can prevent.
  const auto start = Clock::now();
  while (!is_ending_ && cudaEventQuery(last_) == cudaErrorNotReady) {
    cudaGetLastError();
    if (tree_->reason() || seconds_since(start) > timeout_seconds_) {
      interrupt("");
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  if (aborter_.joinable()) aborter_.join();
  if (!is_ending_) {
    const ncclResult_t result = ncclCommDestroy(comm_);
    if (result != ncclSuccess) log::warning("[{}] ncclCommDestroy: {}", name_, ncclGetErrorString(result));
  }
  cudaFree(staging_);
  cudaEventDestroy(last_);
  cudaStreamDestroy(own_stream_);
}

void* NcclGroup::staging() {
  if (staging_ == nullptr) {
    CUDA_CHECK(cudaSetDevice(device_));
    CUDA_CHECK(cudaMalloc(&staging_, kStagingBytes));
  }
  return staging_;
}

void NcclGroup::run(const HostOp& call, cudaStream_t stream, const Enqueue& enqueue) {
  const std::lock_guard lock(call_mutex_);
  check_not_aborted(to_string(call));
  CUDA_CHECK(cudaSetDevice(device_));
  CUDA_CHECK(cudaStreamWaitEvent(stream, last_, 0));
  check_result(enqueue(comm_, stream), call);
  CUDA_CHECK(cudaEventRecord(last_, stream));
  last_call_ = call;
}

void NcclGroup::wait_last() {
  const auto start = Clock::now();
  CUDA_CHECK(cudaSetDevice(device_));
  for (;;) {
    const cudaError_t status = cudaEventQuery(last_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      check_wait(seconds_since(start));
      std::this_thread::sleep_for(kNap);
      continue;
    }
    CUDA_CHECK(status);
    check_wait(0);
    return;
  }
}

void NcclGroup::run_now(const HostOp& call, const std::function<ncclResult_t(ncclComm_t)>& body) {
  wait_last();
  const std::lock_guard lock(call_mutex_);
  check_not_aborted(to_string(call));
  CUDA_CHECK(cudaSetDevice(device_));
  check_result(body(comm_), call);
}

void NcclGroup::interrupt(const std::string&) noexcept {
  if (is_ending_.exchange(true)) return;
  // ncclCommAbort may take a while, and the caller of an abort must not be held up.
  try {
    aborter_ = std::thread([this] { abort_comm(); });
  } catch (const std::system_error&) {
    abort_comm();
  }
}

void NcclGroup::abort_comm() noexcept {
  const std::unique_lock lock(call_mutex_, kCallGrace);
  cudaSetDevice(device_);
  ncclCommAbort(comm_);
}

void NcclGroup::check_wait(double waited_seconds) {
  check_not_aborted("waiting for the GPU");
  if (waited_seconds <= 0) return;
  const std::unique_lock lock(call_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || is_ending_) return;
  ncclResult_t state = ncclSuccess;
  ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
  if (result == ncclSuccess && state != ncclInProgress) result = state;
  if (result != ncclSuccess) {
    fail(fmt::format("[{}] NCCL on rank {}, in or after {}: {}: {}", name_, rank_, to_string(last_call_),
                     ncclGetErrorString(result), ncclGetLastError(comm_)));
  }
  if (waited_seconds < timeout_seconds_) return;
  CUDA_CHECK(cudaSetDevice(device_));
  const cudaError_t status = cudaEventQuery(last_);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(fmt::format("[{}] rank {} waited {:g} s for the GPU with {} not done: a rank of the group is lost, slow "
                   "or calls something else (faults.collective_timeout)",
                   name_, rank_, waited_seconds, to_string(last_call_)));
}

void NcclGroup::check_not_aborted(const std::string& what) const {
  if (const auto reason = tree_->reason()) {
    throw AbortedError(fmt::format("[{}] {} on rank {} was ended: {}", name_, what, rank_, *reason));
  }
}

void NcclGroup::check_result(ncclResult_t result, const HostOp& call) {
  if (result == ncclSuccess) return;
  check_not_aborted(to_string(call));
  const std::string reason = fmt::format("[{}] {} on rank {} failed: {}: {}", name_, to_string(call), rank_,
                                         ncclGetErrorString(result), ncclGetLastError(comm_));
  if (result == ncclInvalidArgument || result == ncclInvalidUsage) {
    tree_->abort(reason);
    throw Error(ErrorKind::kInternal, reason);
  }
  fail(reason);
}

void NcclGroup::fail(const std::string& reason) {
  if (tree_->abort(reason)) throw Error(ErrorKind::kTransient, reason);
  check_not_aborted("waiting for the GPU");
  throw AbortedError(reason);
}

}  // namespace tessera::nccl

#endif
