#include "engine/plan/gpu_model.h"

#include <vector>

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;
// The CUDA context and the kernels of cuBLASLt and cuDNN: 545 MiB measured (H200, driver 580,
// CUDA 13.0).
constexpr std::size_t kContext = std::size_t{545} << 20;
// An allowance for NCCL's channels and buffers, whose size follows the links and groups.
constexpr std::size_t kNccl = kGiB;
constexpr std::size_t kGemmWorkspace = std::size_t{64} << 20;

GpuModel gpu(std::string name, int arch, int sms, std::size_t memory_gib, double peak_tflops,
             double sustained_tflops) {
  GpuModel model;
  model.name = std::move(name);
  model.capabilities.target = DeviceKind::kCuda;
  model.capabilities.sm_arch = arch;
  model.capabilities.sm_count = sms;
  model.capabilities.gemm_workspace = kGemmWorkspace;
  model.capabilities.peak_bf16_flops = peak_tflops * 1e12;
  model.usable_bytes = memory_gib * kGiB;
  model.sustained_bf16_flops = sustained_tflops * 1e12;
  return model;
}

}  // namespace

GpuModel find_gpu_model(const std::string& name, std::int64_t ranks) {
  // Memory as the driver reports it, rounded down; dense bf16 peaks from the datasheets. Sustained
  // rates: Hopper measured (docs/performance.md), the others taken as the same share of their peak.
  const std::vector<GpuModel> models = {
      gpu("h100-sxm", 90, 132, 79, 989, 670),  gpu("h200-sxm", 90, 132, 139, 989, 670),
      gpu("a100-80gb", 80, 108, 79, 312, 210), gpu("l40s", 89, 142, 44, 362, 245),
      gpu("rtx4090", 89, 128, 23, 165, 112),
  };
  if (name == "cpu") {
    GpuModel cpu;
    cpu.name = "cpu";
    return cpu;
  }
  std::string names;
  for (GpuModel model : models) {
    if (model.name == name) {
      model.reserved_bytes = kContext + (ranks > 1 ? kNccl : 0);
      model.usable_bytes -= model.reserved_bytes;
      return model;
    }
    names += model.name + ", ";
  }
  TESSERA_FAIL(ErrorKind::kUser, "[plan] --gpu {} is not known; choose {}or cpu", name, names);
}

}  // namespace tessera
