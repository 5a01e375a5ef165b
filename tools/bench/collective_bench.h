// Times the collectives of a job's ranks over message sizes, as nccl-tests counts them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/device/context.h"
#include "parallel/communicator.h"

namespace tessera {

struct CollectiveBenchOptions {
  std::int64_t smallest = std::int64_t{64} << 10;  // bytes of the whole message
  std::int64_t largest = std::int64_t{256} << 20;
  DType dtype = DType::kBF16;
};

struct CollectiveResult {
  std::string op;             // "all_reduce"
  std::int64_t bytes = 0;     // of the whole message: what all_gather leaves, reduce_scatter reads
  double seconds = 0;         // median of this rank, from event to event
  // What each link carries per second, which hardware bounds: bytes / seconds times
  // 2 (n - 1) / n for all_reduce, (n - 1) / n for the others (send_recv: 1).
  double bus_bytes_per_second = 0;
};

// Collective over `world`: every rank calls it with the same options. Sizes grow by a factor of four.
std::vector<CollectiveResult> run_collective_bench(const CollectiveBenchOptions& options, Communicator& world,
                                                   BackendContext& context);

std::string format_collectives(const std::vector<CollectiveResult>& results, int ranks, const std::string& device);
std::string collectives_json(const std::vector<CollectiveResult>& results, int ranks, const std::string& device);

}  // namespace tessera
