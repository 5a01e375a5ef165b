#include "parallel/gpu_window.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "parallel/communicator.h"
#include "parallel/cuda/window_flags.h"

namespace tessera::cuda {
namespace {

// A poison has this long to reach a peer's GPU.
constexpr std::chrono::seconds kPoisonSeconds(2);

// Tells processes apart, also where containers give them the same numbers.
std::uint64_t process_number() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return (static_cast<std::uint64_t>(random()) << 32 | random()) ^
           static_cast<std::uint64_t>(getpid());
  }();
  return number;
}

// Tells machines apart: handles mean nothing on another one.
std::string machine_number() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string number;
  file >> number;
  return number;
}

// Memory as a peer finds it: by its address in the same process, else by the handle of the
// allocation that holds it.
struct SharedMemory {
  cudaIpcMemHandle_t handle;
  std::uint64_t offset;  // in the allocation
  void* address;
  std::uint64_t bytes;
};

struct Offer {
  char machine[40];
  std::uint64_t process;
  char bus_id[24];  // of the GPU
  int num_flags;
  SharedMemory memory;
  SharedMemory block;  // header and flags
};

// Start of the allocation that holds `data`. The runtime has no such call, and the driver's library
// is not linked.
const char* allocation_of(const void* data) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000,
                                              cudaEnableDefault, &found));
  CHECK(found == cudaDriverEntryPointSuccess, "[window] the driver has no cuMemGetAddressRange");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  const CUresult result = reinterpret_cast<AddressRange>(function)(
      &base, &bytes, reinterpret_cast<CUdeviceptr>(data));
  CHECK(result == CUDA_SUCCESS, "[window] {} is no memory of a GPU (CUDA error {})", data,
        static_cast<int>(result));
  return reinterpret_cast<const char*>(base);
}

// Whether the call went well; forgets the error, which is one of the possible answers.
bool is_granted(cudaError_t status) {
  if (status == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

// False where this memory cannot be shared with other processes.
bool share(void* data, std::size_t bytes, SharedMemory& shared) {
  shared = {};
  shared.address = data;
  shared.bytes = bytes;
  if (bytes == 0) return true;
  const char* base = allocation_of(data);
  shared.offset = static_cast<std::uint64_t>(static_cast<const char*>(data) - base);
  return is_granted(cudaIpcGetMemHandle(&shared.handle, const_cast<char*>(base)));
}

// A peer's memory in this process's address space.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (opened_ != nullptr) cudaIpcCloseMemHandle(opened_);
  }
  Mapping(Mapping&& other) noexcept
      : opened_(std::exchange(other.opened_, nullptr)), data_(other.data_) {}
  Mapping& operator=(Mapping&&) = delete;

  // False where it cannot be reached.
  bool open(const SharedMemory& shared, bool is_same_process) {
    if (shared.bytes == 0) return true;
    if (is_same_process) {
      data_ = static_cast<char*>(shared.address);
      return true;
    }
    void* base = nullptr;
    if (!is_granted(
            cudaIpcOpenMemHandle(&base, shared.handle, cudaIpcMemLazyEnablePeerAccess))) {
      return false;
    }
    opened_ = base;
    data_ = static_cast<char*>(base) + shared.offset;
    return true;
  }
  char* data() const { return data_; }

 private:
  void* opened_ = nullptr;
  char* data_ = nullptr;
};

// Whether this GPU may read and write memory of the other GPU of this process.
bool reaches(int device, int other) {
  if (device == other) return true;
  int can = 0;
  if (!is_granted(cudaDeviceCanAccessPeer(&can, device, other)) || can == 0) return false;
  const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  return status == cudaErrorPeerAccessAlreadyEnabled || is_granted(status);
}

struct Peer {
  Mapping memory;
  Mapping block;
  std::size_t bytes = 0;
};

// Shared with the context, whose waits look at it.
class WindowState final : public WaitWatch, public board::Interruptible {
 public:
  WindowState(const GpuWindowOptions& options, const Tensor& memory, CudaContext& context)
      : options_(options), memory_(memory), device_(context.device().index) {
    context.make_current();
    CUDA_CHECK(cudaMalloc(&block_, block_bytes()));
    CUDA_CHECK(cudaMemset(block_, 0, block_bytes()));
    CUDA_CHECK(cudaDeviceSynchronize());
    void* host = nullptr;
    CUDA_CHECK(cudaHostAlloc(&host, sizeof(HostMemory), cudaHostAllocMapped));
    std::memset(host, 0, sizeof(HostMemory));
    host_ = static_cast<HostMemory*>(host);
    void* seen = nullptr;
    CUDA_CHECK(cudaHostGetDevicePointer(&seen, &host_->failure, 0));
    failure_on_gpu_ = static_cast<WindowFailure*>(seen);
    CUDA_CHECK(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
  }
  ~WindowState() override {
    cudaSetDevice(device_);
    if (own_stream_ != nullptr) {
      cudaStreamSynchronize(own_stream_);
      cudaStreamDestroy(own_stream_);
    }
    peers_.clear();
    cudaFreeHost(host_);
    cudaFree(block_);
  }
  WindowState(const WindowState&) = delete;
  WindowState& operator=(const WindowState&) = delete;

  // Collective; false on every rank where one cannot reach another.
  bool connect(const BlobExchange& exchange) {
    Offer own{};
    std::strncpy(own.machine, machine_number().c_str(), sizeof own.machine - 1);
    own.process = process_number();
    own.num_flags = options_.num_flags;
    CUDA_CHECK(cudaDeviceGetPCIBusId(own.bus_id, sizeof own.bus_id, device_));
    bool can_reach = share(memory_.data, memory_.bytes(), own.memory);
    can_reach = share(block_, block_bytes(), own.block) && can_reach;
    std::vector<Offer> offers;
    for (const std::string& blob : exchange(std::string(reinterpret_cast<char*>(&own), sizeof own))) {
      CHECK(blob.size() == sizeof(Offer), "[{} window] an offer of {} bytes, expected {}",
            options_.name, blob.size(), sizeof(Offer));
      std::memcpy(&offers.emplace_back(), blob.data(), sizeof(Offer));
    }
    CHECK(static_cast<int>(offers.size()) == options_.size, "[{} window] {} offers of {} ranks",
          options_.name, offers.size(), options_.size);
    for (const Offer& offer : offers) {
      CHECK(offer.num_flags == options_.num_flags,
            "[{} make_window] rank {} wants {} flags, another rank {}", options_.name,
            options_.rank, options_.num_flags, offer.num_flags);
      Peer peer;
      peer.bytes = offer.memory.bytes;
      const bool is_here = offer.process == own.process;
      can_reach = can_reach && std::strcmp(offer.machine, own.machine) == 0;
      int device = device_;
      can_reach = can_reach && (!is_here || is_granted(cudaDeviceGetByPCIBusId(&device, offer.bus_id)));
      can_reach = can_reach && reaches(device_, device) && peer.memory.open(offer.memory, is_here) &&
                  peer.block.open(offer.block, is_here);
      peers_.push_back(std::move(peer));
    }
    for (const std::string& answer : exchange(can_reach ? "yes" : "no")) {
      can_reach = can_reach && answer == "yes";
    }
    return can_reach;
  }

  const std::string& name() const { return options_.name; }
  int num_flags() const { return options_.num_flags; }
  int device() const { return device_; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  // The word of `flag` that this rank raises in the block of `peer`.
  std::uint64_t* flag_of(int peer_rank, int flag) const {
    return flags_in(peer(peer_rank).block.data()) + options_.rank * options_.num_flags + flag;
  }
  WindowWait wait_for(int flag, std::uint64_t value) const {
    WindowWait wait{};
    wait.flags = flags_in(static_cast<const void*>(block_)) + flag;
    wait.stride = options_.num_flags;
    wait.writers = options_.size;
    wait.flag = flag;
    wait.value = value;
    wait.limit_nanoseconds = static_cast<std::uint64_t>(options_.timeout_seconds * 1e9);
    wait.header = reinterpret_cast<const WindowHeader*>(block_);
    wait.failure = failure_on_gpu_;
    return wait;
  }

  void check_not_poisoned(const char* what) {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) {
      throw AbortedError(fmt::format("[{} window] {}: {}", options_.name, what, reason_));
    }
  }

  void check_wait(double) override {
    const auto code = std::atomic_ref(host_->failure.code).load(std::memory_order_acquire);
    if (code == WindowFailure::kLate) {
      const WindowFailure& failure = host_->failure;
      const std::string reason = fmt::format(
          "[{} window] rank {} waited {:g} s for flag {} to reach {}; it is {}", options_.name,
          options_.rank, options_.timeout_seconds, failure.flag, failure.wanted, failure.current);
      poison(reason);
      throw Error(ErrorKind::kTransient, reason);
    }
    if (code == WindowFailure::kPoisoned) {
      throw AbortedError(fmt::format("[{} window] the wait of rank {} for flag {} was ended: {}",
                                     options_.name, options_.rank, host_->failure.flag,
                                     read_reason()));
    }
  }

  void interrupt(const std::string& reason) noexcept override { poison(reason); }
  // Tells every rank's GPU. The text goes first, the word that ends waits behind it.
  void poison(const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason.empty() ? "no reason was given" : reason;
    WindowHeader& image = host_->poison;
    image.is_poisoned = 1;
    std::strncpy(image.reason, reason_.c_str(), sizeof image.reason - 1);
    cudaSetDevice(device_);
    for (const Peer& peer : peers_) {
      char* to = peer.block.data();
      if (to == nullptr) continue;
      cudaMemcpyAsync(to + offsetof(WindowHeader, reason), image.reason, sizeof image.reason,
                      cudaMemcpyDefault, own_stream_);
      cudaMemcpyAsync(to, &image.is_poisoned, sizeof image.is_poisoned, cudaMemcpyDefault,
                      own_stream_);
    }
    const auto end = std::chrono::steady_clock::now() + kPoisonSeconds;
    while (cudaStreamQuery(own_stream_) == cudaErrorNotReady &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    cudaGetLastError();
  }

 private:
  // Page-locked: the GPU writes the one and reads the others.
  struct HostMemory {
    WindowFailure failure;
    WindowHeader poison;
    WindowHeader received;
  };

  std::size_t block_bytes() const {
    return sizeof(WindowHeader) +
           static_cast<std::size_t>(options_.size * options_.num_flags) * sizeof(std::uint64_t);
  }
  static std::uint64_t* flags_in(char* block) {
    return reinterpret_cast<std::uint64_t*>(block + sizeof(WindowHeader));
  }
  static const std::uint64_t* flags_in(const void* block) {
    return reinterpret_cast<const std::uint64_t*>(static_cast<const char*>(block) +
                                                  sizeof(WindowHeader));
  }
  std::string read_reason() {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) {
      CUDA_CHECK(cudaSetDevice(device_));
      CUDA_CHECK(cudaMemcpyAsync(&host_->received, block_, sizeof(WindowHeader), cudaMemcpyDefault,
                                 own_stream_));
      CUDA_CHECK(cudaStreamSynchronize(own_stream_));
      host_->received.reason[sizeof host_->received.reason - 1] = '\0';
      reason_ = host_->received.reason;
    }
    return reason_;
  }

  GpuWindowOptions options_;
  Tensor memory_;
  int device_;
  void* block_ = nullptr;
  HostMemory* host_ = nullptr;
  WindowFailure* failure_on_gpu_ = nullptr;
  cudaStream_t own_stream_ = nullptr;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  std::string reason_;  // of the poison; empty: none is known
};

class GpuWindow final : public PeerWindow {
 public:
  GpuWindow(int rank, int size, std::shared_ptr<WindowState> state)
      : PeerWindow(rank, size), state_(std::move(state)) {}

  std::size_t bytes_of(int peer) const override {
    check_peer(peer);
    return state_->peer(peer).bytes;
  }
  void put(const void* src, std::size_t bytes, int peer, std::size_t offset,
           Stream& stream) override {
    const std::size_t room = bytes_of(peer);
    CHECK(offset <= room && bytes <= room - offset,
          "[window put] {} bytes at {} do not fit the {} bytes of rank {}", bytes, offset, room,
          peer);
    const cudaStream_t s = stream_for("put", stream);
    if (bytes == 0) return;
    CUDA_CHECK(cudaMemcpyAsync(state_->peer(peer).memory.data() + offset, src, bytes,
                               cudaMemcpyDefault, s));
  }
  void signal(int peer, int flag, std::uint64_t value, Stream& stream) override {
    check_peer(peer);
    check_flag(flag);
    raise_window_flag(state_->flag_of(peer, flag), value, stream_for("signal", stream));
  }
  void wait(int flag, std::uint64_t value, Stream& stream) override {
    check_flag(flag);
    await_window_flag(state_->wait_for(flag, value), stream_for("wait", stream));
  }
  void poison(const std::string& reason) noexcept override { state_->poison(reason); }

 private:
  cudaStream_t stream_for(const char* what, Stream& stream) const {
    CHECK(stream.device() == (Device{DeviceKind::kCuda, state_->device()}),
          "[{} window] {}: the window is on cuda:{}, the stream on {}", state_->name(), what,
          state_->device(), to_string(stream.device()));
    state_->check_not_poisoned(what);
    return native(stream);
  }
  void check_peer(int peer) const {
    CHECK(peer >= 0 && peer < size(), "[window] peer is {}, expected 0 to {}", peer, size() - 1);
  }
  void check_flag(int flag) const {
    CHECK(flag >= 0 && flag < state_->num_flags(), "[window] flag is {}, the window has {}", flag,
          state_->num_flags());
  }

  std::shared_ptr<WindowState> state_;  // the context's watches hold it while they look
};

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

std::unique_ptr<PeerWindow> make_gpu_window(const GpuWindowOptions& options, const Tensor& memory,
                                            BackendContext& context, const BlobExchange& exchange) {
  CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size &&
            options.num_flags >= 0,
        "[{} make_window] rank {} of {} with {} flags", options.name, options.rank, options.size,
        options.num_flags);
  CHECK(memory.is_dense() && memory.device == context.device() &&
            context.device().kind == DeviceKind::kCuda,
        "[{} make_window] memory {} on {}, expected a dense one on a GPU", options.name,
        to_string(memory), to_string(context.device()));
  cuda::CudaContext& gpu = cuda::as_cuda(context);
  const auto state = std::make_shared<cuda::WindowState>(options, memory, gpu);
  if (!state->connect(exchange)) return nullptr;
  gpu.add_watch(state);
  if (options.tree != nullptr) options.tree->add(state);
  return std::make_unique<cuda::GpuWindow>(options.rank, options.size, state);
}

}  // namespace tessera
