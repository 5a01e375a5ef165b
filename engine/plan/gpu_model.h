// What the planner knows of the GPUs it plans for: datasheet sizes and the rates of a soaked card.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/device/context.h"

namespace tessera {

struct GpuModel {
  std::string name;
  Capabilities capabilities;
  std::size_t usable_bytes = 0;     // for Tessera's arenas; 0: unlimited (cpu)
  std::size_t reserved_bytes = 0;   // driver context, library handles, communication buffers
  // After seconds of load; 0: unknown.
  double sustained_bf16_flops = 0;  // matrix products
  double sustained_fp8_flops = 0;
  double sustained_attention_flops = 0;  // forward and backward together
  double copy_bytes_per_second = 0;      // read and written
  double link_bytes_per_second = 0;      // of a GPU to the others of its node, in large messages
};

// By name ("h100-sxm"), for a job of `ranks`; kUser, listing the names, if there is no such model.
GpuModel find_gpu_model(const std::string& name, std::int64_t ranks);

}  // namespace tessera
