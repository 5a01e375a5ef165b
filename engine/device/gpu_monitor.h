// The clock and power of a GPU while something runs: a card at its power limit lowers its clock, so
// a rate says little without them. Sampled from a thread of its own through the driver's NVML.
#pragma once

#include <memory>

namespace tessera {

struct GpuCondition {
  int samples = 0;
  double sm_mhz = 0;       // median
  double watts = 0;        // median
  double limit_watts = 0;  // the card's power limit; 0: unknown
  double temperature = 0;  // degrees Celsius, the last one
};

class GpuMonitor {
 public:
  virtual ~GpuMonitor() = default;
  // Ends the sampling; what was seen since the start. To be called once.
  virtual GpuCondition stop() = 0;

  // Watches the CUDA device of this index; null where nothing can be read: no GPU, or no NVML.
  static std::unique_ptr<GpuMonitor> start(int device);
};

}  // namespace tessera
