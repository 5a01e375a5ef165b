#include "engine/device/cuda/cuda_context.h"

#include <cctype>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/core/error.h"
#include "engine/device/cuda/cuda_check.h"

namespace tessera::cuda {
namespace {

// What cuBLASLt may use on Hopper for its split-K and stream-K kernels.
constexpr std::size_t kGemmWorkspace = std::size_t{64} << 20;

// A watched wait spins this long, then sleeps in naps.
constexpr std::chrono::microseconds kSpin(100);
constexpr std::chrono::microseconds kNap(50);
constexpr std::chrono::milliseconds kWatchInterval(5);

// Left to the driver and to libraries that allocate outside our arenas (cuBLAS, cuDNN and NCCL load their
// kernels and buffers late).
constexpr std::size_t kReservedBytes = std::size_t{512} << 20;

// Dense bf16 by NVIDIA's datasheets, accumulated in fp32. The first name found in the GPU's own counts, so
// special models stand before the general one.
struct PeakFlops {
  std::string_view name;
  double bf16;
};
constexpr PeakFlops kPeaks[] = {
    {"GB200", 2500e12},    {"B200", 2250e12}, {"GH200", 989e12},    {"H200 NVL", 835e12}, {"H200", 989e12},
    {"H100 NVL", 835e12},  {"H100 PCIe", 756e12}, {"H100", 989e12}, {"H800", 989e12},     {"H20", 148e12},
    {"A100", 312e12},      {"A800", 312e12},  {"L40S", 362e12},     {"L40", 181e12},      {"L4", 121e12},
    {"A40", 150e12},       {"A30", 165e12},   {"A10", 125e12},      {"RTX 6000 Ada", 364e12},
    {"RTX 4090", 165e12},  {"RTX 3090", 71e12},
};

// Whether `name` stands in `text` as words of its own: an RTX A4000 is no A40.
bool has_words(std::string_view text, std::string_view name) {
  const auto is_part_of_word = [&](std::size_t i) {
    return i < text.size() && std::isalnum(static_cast<unsigned char>(text[i])) != 0;
  };
  for (std::size_t at = text.find(name); at != text.npos; at = text.find(name, at + 1)) {
    if ((at == 0 || !is_part_of_word(at - 1)) && !is_part_of_word(at + name.size())) return true;
  }
  return false;
}

double peak_bf16_flops(std::string_view gpu_name) {
  for (const PeakFlops& peak : kPeaks) {
    if (has_words(gpu_name, peak.name)) return peak.bf16;
  }
  return 0;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

Capabilities query_capabilities(int index) {
  const int count = device_count();
  CHECK_USER(index >= 0 && index < count,
             "[device] cuda:{} was asked for but {} GPU{} can be used here; check CUDA_VISIBLE_DEVICES "
             "and nvidia-smi, or use run.device: cpu",
             index, count, count == 1 ? "" : "s");
  Capabilities result;
  result.target = DeviceKind::kCuda;
  result.sm_arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                   attribute(cudaDevAttrComputeCapabilityMinor, index);
  result.sm_count = attribute(cudaDevAttrMultiProcessorCount, index);
  result.gemm_workspace = kGemmWorkspace;
  return result;
}

const char* name_of(MemoryKind kind) {
  return kind == MemoryKind::kPinnedHost ? "pinned host" : "GPU";
}

}  // namespace

CudaContext::CudaContext(int index, const ContextOptions& options)
    : BackendContext(Device{DeviceKind::kCuda, index}, query_capabilities(index)), options_(options) {
  make_current();
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  gpu_name_ = properties.name;
  capabilities_.peak_bf16_flops = peak_bf16_flops(properties.name);
  shared_memory_limit_ = properties.sharedMemPerBlockOptin;
}

CudaContext::~CudaContext() {
  cudaSetDevice(device_.index);
  extensions_.clear();
}

void CudaContext::make_current() const { CUDA_CHECK(cudaSetDevice(device_.index)); }

void* CudaContext::allocate(std::size_t bytes, MemoryKind kind) {
  if (bytes == 0) return nullptr;
  make_current();
  void* data = nullptr;
  const cudaError_t status = kind == MemoryKind::kPinnedHost
                                 ? cudaHostAlloc(&data, bytes, cudaHostAllocPortable)
                                 : cudaMalloc(&data, bytes);
  if (status == cudaSuccess) return data;
  cudaGetLastError();
  if (status != cudaErrorMemoryAllocation) fail_cuda(status, "cudaMalloc");
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (kind == MemoryKind::kPinnedHost || cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
    TESSERA_FAIL(ErrorKind::kAnswerNo, "[memory] {} bytes of {} memory could not be allocated", bytes,
                 name_of(kind));
  }
  TESSERA_FAIL(ErrorKind::kAnswerNo,
               "[memory] cuda:{} has {} of {} bytes free, {} are wanted; use a smaller micro-batch, "
               "memory.recompute: full, or more parallelism",
               device_.index, free_bytes, total_bytes, bytes);
}

std::size_t CudaContext::available_bytes() const {
  make_current();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  // 0 would mean "unknown": a full GPU has one byte left.
  return free_bytes > kReservedBytes ? free_bytes - kReservedBytes : 1;
}

void CudaContext::release(void* data, std::size_t, MemoryKind kind) noexcept {
  cudaSetDevice(device_.index);
  if (kind == MemoryKind::kPinnedHost) {
    cudaFreeHost(data);
  } else {
    cudaFree(data);
  }
}

void CudaContext::add_watch(std::weak_ptr<WaitWatch> watch) {
  const std::lock_guard lock(watch_mutex_);
  std::erase_if(watches_, [](const auto& one) { return one.expired(); });
  watches_.push_back(std::move(watch));
}

std::vector<std::shared_ptr<WaitWatch>> CudaContext::live_watches() {
  const std::lock_guard lock(watch_mutex_);
  std::vector<std::shared_ptr<WaitWatch>> result;
  for (const auto& one : watches_) {
    if (auto watch = one.lock()) result.push_back(std::move(watch));
  }
  return result;
}

template <typename Query>
void CudaContext::wait(Query&& query, const char* call) {
  using Clock = std::chrono::steady_clock;
  const auto watches = live_watches();
  const auto start = Clock::now();
  auto next_check = start + kWatchInterval;
  for (;;) {
    const cudaError_t status = query();
    if (status != cudaErrorNotReady) {
      if (status != cudaSuccess) fail_cuda(status, call);
      break;
    }
    cudaGetLastError();
    const auto now = Clock::now();
    if (now - start < kSpin) continue;
    if (now >= next_check) {
      const double waited = std::chrono::duration<double>(now - start).count();
      for (const auto& watch : watches) watch->check_wait(waited);
      next_check = now + kWatchInterval;
    }
    std::this_thread::sleep_for(kNap);
  }
  for (const auto& watch : watches) watch->check_wait(0);
}

std::unique_ptr<Stream> CudaContext::make_stream(const std::string& name) {
  return std::make_unique<CudaStream>(*this, name);
}

std::unique_ptr<Event> CudaContext::make_event() { return std::make_unique<CudaEvent>(*this); }

CudaEvent::CudaEvent(CudaContext& context) : context_(&context) {
  context.make_current();
  CUDA_CHECK(cudaEventCreate(&event_));
}

CudaEvent::~CudaEvent() {
  cudaSetDevice(context_->device().index);
  cudaEventDestroy(event_);
}

void CudaEvent::synchronize() {
  context_->make_current();
  if (context_->is_watched()) {
    context_->wait([this] { return cudaEventQuery(event_); }, "cudaEventSynchronize");
  } else {
    CUDA_CHECK(cudaEventSynchronize(event_));
  }
}

bool CudaEvent::is_done() const {
  context_->make_current();
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  CUDA_CHECK(status);
  return true;
}

double CudaEvent::milliseconds_since(const Event& start) const {
  context_->make_current();
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(start).event_, event_));
  return milliseconds;
}

CudaStream::CudaStream(CudaContext& context, std::string name)
    : Stream(&context, std::move(name)), cuda_context_(&context) {
  context.make_current();
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaStream::~CudaStream() {
  cudaSetDevice(cuda_context_->device().index);
  cudaStreamSynchronize(stream_);
  extensions_.clear();
  cudaStreamDestroy(stream_);
}

void CudaStream::record(Event& event) {
  cuda_context_->make_current();
  CUDA_CHECK(cudaEventRecord(static_cast<CudaEvent&>(event).native(), stream_));
}

void CudaStream::wait(const Event& event) {
  cuda_context_->make_current();
  CUDA_CHECK(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).native(), 0));
}

void CudaStream::synchronize() {
  cuda_context_->make_current();
  if (cuda_context_->is_watched()) {
    cuda_context_->wait([this] { return cudaStreamQuery(stream_); }, "cudaStreamSynchronize");
  } else {
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
}

void CudaStream::copy_bytes(void* dst, const void* src, std::size_t bytes) {
  if (bytes == 0) return;
  cuda_context_->make_current();
  CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_));
}

void CudaStream::set_zero(void* dst, std::size_t bytes) {
  if (bytes == 0) return;
  cuda_context_->make_current();
  CUDA_CHECK(cudaMemsetAsync(dst, 0, bytes, stream_));
}

cudaStream_t native(Stream& stream) {
  CudaStream& cuda_stream = as_cuda(stream);
  cuda_stream.cuda_context().make_current();
  return cuda_stream.native();
}

std::unique_ptr<BackendContext> make_context(int index, const ContextOptions& options) {
  return std::make_unique<CudaContext>(index, options);
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace tessera::cuda
