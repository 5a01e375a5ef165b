// NcclGroup: one rank's ncclComm_t with its time limit and its end. It lives as long as anything of the
// group is enqueued or may abort it.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/device/cuda/cuda_context.h"
#include "parallel/board/abort_tree.h"
#include "parallel/host_communicator.h"

namespace tessera::nccl {

class NcclGroup final : public board::Interruptible, public cuda::WaitWatch {
 public:
  // Takes over `comm`, of GPU `device`. The caller adds the group to `tree`.
  NcclGroup(ncclComm_t comm, int device, int rank, int size, std::string name,
            std::shared_ptr<board::AbortTree> tree, double timeout_seconds);
  ~NcclGroup() override;

  int device() const { return device_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  double timeout_seconds() const { return timeout_seconds_; }
  const std::shared_ptr<board::AbortTree>& tree() const { return tree_; }
  // A stream for what belongs to no other: barriers and splits.
  cudaStream_t own_stream() const { return own_stream_; }
  // Device memory for what belongs to no tensor, behind the operation that uses it alone.
  void* staging();
  static constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

  // Enqueues an operation behind all earlier ones of the group, whichever streams they were given.
  using Enqueue = std::function<ncclResult_t(ncclComm_t comm, cudaStream_t stream)>;
  void run(const HostOp& call, cudaStream_t stream, const Enqueue& enqueue);
  // Blocks until everything enqueued so far is done.
  void wait_last();
  // Calls NCCL once everything enqueued so far is done; for split.
  void run_now(const HostOp& call, const std::function<ncclResult_t(ncclComm_t comm)>& body);

  // Ends the operations under way, in a thread of its own.
  void interrupt(const std::string& reason) noexcept override;
  void check_wait(double waited_seconds) override;

 private:
  void check_not_aborted(const std::string& what) const;
  void check_result(ncclResult_t result, const HostOp& call);
  // Ends the world with `reason`, and throws: as the cause, unless the world had ended before.
  [[noreturn]] void fail(const std::string& reason);
  void abort_comm() noexcept;

  ncclComm_t comm_;
  int device_;
  int rank_;
  int size_;
  std::string name_;
  std::shared_ptr<board::AbortTree> tree_;
  double timeout_seconds_;
  cudaStream_t own_stream_ = nullptr;
  cudaEvent_t last_ = nullptr;  // end of the last operation
  void* staging_ = nullptr;
  // Held while NCCL works for this rank: an abort waits for it a moment, since it frees the communicator.
  std::timed_mutex call_mutex_;
  HostOp last_call_;
  std::atomic<bool> is_ending_ = false;
  std::thread aborter_;
};

}  // namespace tessera::nccl
