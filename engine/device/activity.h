// What a device spent its time on: kernels by what they compute, and a stretch of time divided
// among them without counting any moment twice. Pure functions over records, whoever made them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// In the order in which a moment is claimed when several run at once: what communicates is exposed
// only while nothing computes.
enum class Activity : unsigned char {
  kGemm,
  kAttention,
  kMemoryBound,
  kOptimizer,
  kCommunication,
  kCopy,  // between the host and the device
};
inline constexpr int kActivities = 6;

// "GEMM", "attention", "memory-bound", "optimizer", "communication", "host copies".
const char* name_of(Activity activity);

struct ActivityKind {
  Activity activity = Activity::kMemoryBound;
  std::string op;  // "rmsnorm_backward", "attention forward", "all_gather"
};

// What the kernel of this name does, mangled or demangled: our own by the file and function that it
// was written in, those of cuBLASLt, cuDNN, CUTLASS and NCCL by how they are named. A kernel that
// is not known counts as memory-bound under its own name. Also takes KernelRecord's memory
// operations.
ActivityKind classify_kernel(std::string_view name);

struct ActivitySpan {
  ActivityKind kind;
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
};

struct OpTime {
  ActivityKind kind;
  std::int64_t count = 0;    // spans that touch the stretch
  double total_seconds = 0;  // of them, overlapped or not
  double seconds = 0;        // of the stretch that they claim
};

struct ActivityBreakdown {
  double span_seconds = 0;
  double idle_seconds = 0;                 // nothing ran
  double seconds[kActivities] = {};        // claimed; with idle they add up to the stretch
  double total_seconds[kActivities] = {};  // of communication: hidden and exposed
  std::vector<OpTime> ops;                 // by activity, then by time claimed, largest first
};

// Divides [begin_ns, end_ns) among the spans: each moment goes to the first activity in the order
// of the enumeration that has a span there, and among those of one activity to the one begun first.
ActivityBreakdown break_down(const std::vector<ActivitySpan>& spans, std::uint64_t begin_ns,
                             std::uint64_t end_ns);

}  // namespace tessera
