// NVML comes with the driver and is opened at run time. Its functions are declared here as its
// documentation gives them (NVML API Reference, "Device Queries"), since not every toolkit brings
// nvml.h.
#include "engine/device/gpu_monitor.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kInterval(50);
constexpr int kSmClock = 1;    // NVML_CLOCK_SM
constexpr int kGpuSensor = 0;  // NVML_TEMPERATURE_GPU

using Handle = void*;  // nvmlDevice_t

struct Library {
  int (*init)();
  int (*handle_by_bus)(const char*, Handle*);
  int (*clock)(Handle, int, unsigned*);
  int (*power)(Handle, unsigned*);
  int (*limit)(Handle, unsigned*);
  int (*temperature)(Handle, int, unsigned*);

  bool open() {
    void* handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return false;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      return function != nullptr;
    };
    return find(init, "nvmlInit_v2") && find(handle_by_bus, "nvmlDeviceGetHandleByPciBusId_v2") &&
           find(clock, "nvmlDeviceGetClockInfo") && find(power, "nvmlDeviceGetPowerUsage") &&
           find(limit, "nvmlDeviceGetEnforcedPowerLimit") &&
           find(temperature, "nvmlDeviceGetTemperature") && init() == 0;
  }
};

double median(std::vector<double>& values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class NvmlMonitor : public GpuMonitor {
 public:
  NvmlMonitor(const Library& library, Handle handle)
      : library_(library), handle_(handle), thread_([this] { sample(); }) {}
  ~NvmlMonitor() override { end(); }

  GpuCondition stop() override {
    end();
    GpuCondition result;
    result.samples = static_cast<int>(watts_.size());
    result.sm_mhz = median(clocks_);
    result.watts = median(watts_);
    unsigned value = 0;
    if (library_.limit(handle_, &value) == 0) result.limit_watts = value / 1e3;
    if (library_.temperature(handle_, kGpuSensor, &value) == 0) result.temperature = value;
    return result;
  }

 private:
  void sample() {
    std::unique_lock lock(mutex_);
    while (!ends_) {
      unsigned clock = 0, milliwatts = 0;
      if (library_.clock(handle_, kSmClock, &clock) == 0 &&
          library_.power(handle_, &milliwatts) == 0) {
        clocks_.push_back(clock);
        watts_.push_back(milliwatts / 1e3);
      }
      wake_.wait_for(lock, kInterval, [this] { return ends_; });
    }
  }
  void end() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Library library_;
  Handle handle_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ends_ = false;
  std::vector<double> clocks_;
  std::vector<double> watts_;
  std::thread thread_;  // last: it uses what stands above
};

}  // namespace

std::unique_ptr<GpuMonitor> GpuMonitor::start(int device) {
  char bus[32] = {};
  Library library;
  Handle handle = nullptr;
  // By the bus: NVML counts all cards, CUDA those of CUDA_VISIBLE_DEVICES.
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess || !library.open() ||
      library.handle_by_bus(bus, &handle) != 0) {
    cudaGetLastError();
    return nullptr;
  }
  return std::make_unique<NvmlMonitor>(library, handle);
}

}  // namespace tessera
