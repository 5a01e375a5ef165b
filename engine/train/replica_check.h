// ReplicaCheck: whether ranks that hold copies of a parameter hold the same bits (faults.check_replicas). They do unless
// memory or a GPU is faulty, or a sum was left out: replicas then drift apart without a sign in the loss.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model_runtime.h"

namespace tessera {

class ReplicaCheck {
 public:
  // Collective in form: every rank makes one.
  explicit ReplicaCheck(ModelRuntime& runtime);

  // Compares checksums (CRC-32C) of what each rank holds of each parameter: over the data-parallel ranks (those with the
  // same shard under ZeRO 3), and over the tensor-parallel ranks for what these hold in copies. Every rank calls it after
  // the same step; blocks, and copies the weights to the host. kTransient, naming the first parameter and the ranks that
  // are alone, where copies differ: all ranks of the group that sees it fail.
  void check(std::int64_t step) const;

 private:
  std::vector<std::int64_t> checksums() const;
  // What is wrong; empty if nothing. Collective over `group`.
  std::string compare(Communicator& group, const char* kind, const std::vector<std::int64_t>& own,
                      const std::vector<bool>& is_compared, std::int64_t step) const;

  ModelRuntime* runtime_;
  std::vector<std::string> names_;
  std::vector<bool> all_;
  std::vector<bool> tensor_copies_;  // whether every tensor-parallel rank holds the same piece
};

}  // namespace tessera
