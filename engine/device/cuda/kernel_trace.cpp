// CUPTI's activity records. The library is opened at run time: it belongs to the toolkit, not to
// the driver, and training does without it.
#include "engine/device/kernel_trace.h"

#include <cuda_runtime.h>
#include <cupti.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "engine/device/context.h"

namespace tessera {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::size_t kBufferAlignment = 8;  // of activity records, by CUPTI's documentation

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                                         CUPTI_ACTIVITY_KIND_MEMSET};

struct Library {
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush;
  decltype(&cuptiActivityGetNextRecord) next;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;

  bool open(std::string& problem) {
    void* handle = nullptr;
    const std::string versioned = fmt::format("libcupti.so.{}", CUDART_VERSION / 1000);
    // The toolkit's installer leaves it outside the linker's path.
    for (const char* folder :
         {"", "/usr/local/cuda/lib64/", "/usr/local/cuda/extras/CUPTI/lib64/"}) {
      if (handle == nullptr) handle = dlopen((folder + versioned).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == nullptr) {
      problem = fmt::format("{} of the CUDA toolkit is not on the library path", versioned);
      return false;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      return function != nullptr;
    };
    const bool is_whole =
        find(enable, "cuptiActivityEnable") && find(disable, "cuptiActivityDisable") &&
        find(flush, "cuptiActivityFlushAll") && find(next, "cuptiActivityGetNextRecord") &&
        find(register_callbacks, "cuptiActivityRegisterCallbacks");
    if (!is_whole) problem = "the CUPTI library lacks the activity functions";
    return is_whole;
  }
};

const char* name_of_copy(std::uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "copy device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
      return "copy peer";
    default:
      return "copy host";
  }
}

class CuptiTrace : public KernelTrace {
 public:
  explicit CuptiTrace(const Library& library) : library_(library) {}
  ~CuptiTrace() override { end(); }

  bool begin(std::string& problem) {
    const std::lock_guard lock(current_mutex());
    if (current() != nullptr) {
      problem = "another trace of this process is being recorded";
      return false;
    }
    if (library_.register_callbacks(&give_buffer, &take_buffer) != CUPTI_SUCCESS) {
      problem = "CUPTI is in use by another tool";
      return false;
    }
    for (const CUpti_ActivityKind kind : kKinds) {
      if (library_.enable(kind) != CUPTI_SUCCESS) {
        problem = "the driver does not let this process record kernels";
        return false;
      }
    }
    current() = this;
    return true;
  }

  std::vector<KernelRecord> stop() override {
    cudaDeviceSynchronize();
    end();
    std::sort(records_.begin(), records_.end(),
              [](const KernelRecord& a, const KernelRecord& b) { return a.begin_ns < b.begin_ns; });
    return std::move(records_);
  }

 private:
  // CUPTI's callbacks carry no argument of ours: the one trace that records now.
  static CuptiTrace*& current() {
    static CuptiTrace* trace = nullptr;
    return trace;
  }
  static std::mutex& current_mutex() {
    static std::mutex mutex;
    return mutex;
  }

  static void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
    *size = *buffer == nullptr ? 0 : kBufferBytes;
    *records = 0;  // as many as fit
  }

  static void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                                   std::size_t valid) {
    {
      const std::lock_guard lock(current_mutex());
      if (current() != nullptr) current()->read(buffer, valid);
    }
    std::free(buffer);
  }

  void read(std::uint8_t* buffer, std::size_t valid) {
    CUpti_Activity* record = nullptr;
    while (library_.next(buffer, valid, &record) == CUPTI_SUCCESS) {
      switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
          // The fields used stand at the same place in every version of the record since 8.
          const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel8*>(record);
          add(kernel->name != nullptr ? kernel->name : "unknown", *kernel);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
          const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
          add(name_of_copy(copy->copyKind), *copy);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY2:
          add("copy peer", *reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record));
          break;
        case CUPTI_ACTIVITY_KIND_MEMSET:
          add("set", *reinterpret_cast<const CUpti_ActivityMemset4*>(record));
          break;
        default:
          break;
      }
    }
  }

  template <typename Record>
  void add(std::string name, const Record& record) {
    records_.push_back({std::move(name), static_cast<int>(record.deviceId),
                        static_cast<int>(record.streamId), record.start, record.end});
  }

  void end() {
    {
      const std::lock_guard lock(current_mutex());
      if (current() != this) return;
    }
    library_.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (const CUpti_ActivityKind kind : kKinds) library_.disable(kind);
    const std::lock_guard lock(current_mutex());
    current() = nullptr;
  }

  Library library_;
  std::vector<KernelRecord> records_;
};

}  // namespace

std::unique_ptr<KernelTrace> KernelTrace::start(std::string& problem) {
  if (cuda_device_count() == 0) {
    problem = "this machine has no GPU that can be used";
    return nullptr;
  }
  Library library;
  if (!library.open(problem)) return nullptr;
  auto trace = std::make_unique<CuptiTrace>(library);
  if (!trace->begin(problem)) return nullptr;
  return trace;
}

}  // namespace tessera
