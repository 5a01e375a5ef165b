// When the kernels and copies of this process's GPUs ran: what a benchmark's breakdown and a
// timeline are made of. Recorded by CUPTI, which costs a few microseconds of host time per kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct KernelRecord {
  // As the driver has it (mangled; classify_kernel in engine/device/activity.h reads it); "set" and
  // "copy host", "copy device", "copy peer" for memory operations.
  std::string name;
  int device = 0;
  int stream = 0;  // the driver's number
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
};

// Records from its making to stop(); one at a time in a process.
class KernelTrace {
 public:
  virtual ~KernelTrace() = default;

  // Waits for the GPU's work and returns what ran, by begin time. To be called once.
  virtual std::vector<KernelRecord> stop() = 0;

  // Null with the reason in `problem` where nothing can be recorded: no GPU, or no CUPTI.
  static std::unique_ptr<KernelTrace> start(std::string& problem);
};

}  // namespace tessera
