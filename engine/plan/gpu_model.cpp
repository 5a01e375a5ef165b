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

struct Rates {
  double peak_tflops, bf16_tflops, fp8_tflops, attention_tflops, copy_gb, link_gb;
};

GpuModel gpu(std::string name, int arch, int sms, std::size_t memory_gib, const Rates& rates) {
  GpuModel model;
  model.name = std::move(name);
  model.capabilities.target = DeviceKind::kCuda;
  model.capabilities.sm_arch = arch;
  model.capabilities.sm_count = sms;
  model.capabilities.gemm_workspace = kGemmWorkspace;
  model.capabilities.peak_bf16_flops = rates.peak_tflops * 1e12;
  model.usable_bytes = memory_gib * kGiB;
  model.sustained_bf16_flops = rates.bf16_tflops * 1e12;
  model.sustained_fp8_flops = rates.fp8_tflops * 1e12;
  model.sustained_attention_flops = rates.attention_tflops * 1e12;
  model.copy_bytes_per_second = rates.copy_gb * 1e9;
  model.link_bytes_per_second = rates.link_gb * 1e9;
  return model;
}

}  // namespace

GpuModel find_gpu_model(const std::string& name, std::int64_t ranks) {
  // Memory as the driver reports it, rounded down; dense bf16 peaks from the datasheets. Sustained
  // rates: H200 measured (docs/performance.md), the others taken as the same shares of their
  // datasheets; those without FP8 run it as bf16. Links: NVLink, of the last two PCIe 4.
  const std::vector<GpuModel> models = {
      gpu("h100-sxm", 90, 132, 79, {989, 670, 1280, 400, 2900, 250}),
      gpu("h200-sxm", 90, 132, 139, {989, 670, 1280, 400, 4000, 250}),
      gpu("a100-80gb", 80, 108, 79, {312, 210, 210, 130, 1700, 170}),
      gpu("l40s", 89, 142, 44, {362, 245, 470, 150, 720, 22}),
      gpu("rtx4090", 89, 128, 23, {165, 112, 220, 70, 850, 20}),
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
