// BackendContext: what one rank holds of one device — memory, streams, events, and the library
// handles and worker threads that ops need. Everything reaches it through a Stream; nothing is static.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "engine/core/device.h"

namespace tessera {

class Event;
class Stream;

enum class MemoryKind : unsigned char {
  kDevice,      // plain device memory (host memory on cpu)
  kRegistered,  // device memory that communication libraries may register (ncclMemAlloc on cuda)
  kPinnedHost,  // page-locked host memory (plain host memory on cpu)
};

// What a device can do, as far as memory and kernel choices depend on it. On the meta device these
// are the capabilities of the device that is being planned for.
struct Capabilities {
  DeviceKind target = DeviceKind::kCpu;
  int cpu_threads = 1;               // threads that one op may use
  int sm_arch = 0;                   // 90 for Hopper; 0 on cpu
  int sm_count = 0;
  std::size_t gemm_workspace = 0;    // bytes reserved for cuBLASLt per stream
  double peak_bf16_flops = 0;        // dense bf16 by the datasheet, per second; 0: unknown
};

struct ContextOptions {
  // cpu: threads that one op may use (including the caller's).
  int cpu_threads = 1;
  // cpu: streams run each closure at once in the caller's thread instead of on a worker thread.
  // Used for many ranks on few cores.
  bool inline_streams = true;
  // meta: the capabilities being planned for.
  Capabilities planned;
  // cuda: time the algorithms that cuBLASLt proposes for a shape at its first product and keep the
  // fastest. Off: its first proposal. See kernels/gemm_choices.h for keeping choices between runs.
  bool autotune_gemm = false;
};

class BackendContext {
 public:
  virtual ~BackendContext() = default;

  Device device() const { return device_; }
  const Capabilities& capabilities() const { return capabilities_; }

  // `bytes` of memory aligned to 256 bytes (kDevice, kRegistered) or a page (kPinnedHost); null on
  // meta. Throws kAnswerNo with the free and wanted bytes when there is not enough.
  virtual void* allocate(std::size_t bytes, MemoryKind kind) = 0;
  virtual void release(void* data, std::size_t bytes, MemoryKind kind) noexcept = 0;

  // Bytes of device memory that can still be allocated; 0: unknown.
  virtual std::size_t available_bytes() const { return 0; }

  // `name` appears in traces and error messages.
  virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;

 protected:
  BackendContext(Device device, Capabilities capabilities)
      : device_(device), capabilities_(capabilities) {}

  Device device_;
  Capabilities capabilities_;
};

// A context for `device`; cuda throws kUser in a build without CUDA or where no such GPU exists.
std::unique_ptr<BackendContext> make_context(Device device, const ContextOptions& options = {});

// Number of CUDA devices this process can use; 0 without a GPU, a driver or a CUDA build.
int cuda_device_count();

namespace cpu {
std::unique_ptr<BackendContext> make_context(const ContextOptions& options);
}
namespace meta {
std::unique_ptr<BackendContext> make_context(const ContextOptions& options);
}
namespace cuda {
std::unique_ptr<BackendContext> make_context(int index, const ContextOptions& options);
int device_count();
}

}  // namespace tessera
