// The plan of the file that one rank writes: the header's bytes and, behind them, every extent at its
// place. The file is a valid safetensors file whose data part begins at a multiple of 4096 bytes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/named_state.h"

namespace tessera {

class FileImage {
 public:
  // Bytes [offset, + bytes) of the file come from `source`, which is on `device`.
  struct Part {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    const char* source = nullptr;
    bool is_stable = false;  // NamedState::changes_only_in_update
  };

  FileImage() = default;
  // Checks every state (kInternal: piece inside the tensor, dense, of the state's dtype) and lays out
  // what this rank writes. `metadata` goes into the safetensors header.
  FileImage(std::span<const NamedState> states, const std::map<std::string, std::string>& metadata);

  std::uint64_t bytes() const { return bytes_; }
  const std::string& head() const { return head_; }  // bytes [0, head().size())
  // In file order and without holes from head().size() to bytes(). Neighbours that are also
  // neighbours in memory are one part.
  const std::vector<Part>& parts() const { return parts_; }
  // Every state of this rank, with the extents it writes in file 0 of a list yet to be filled.
  const std::map<std::string, CheckpointTensor, std::less<>>& tensors() const { return tensors_; }

 private:
  std::uint64_t bytes_ = 0;
  std::string head_;
  std::vector<Part> parts_;
  std::map<std::string, CheckpointTensor, std::less<>> tensors_;
};

// The name of an extent in a safetensors file: the tensor's own where it is whole, else with its
// region in slice notation: "adam_m/model.norm.weight[0:128]", "...weight[0:128,64:128]".
std::string extent_name(const std::string& tensor, const Shape& shape,
                        const CheckpointExtent& extent);
// The shape of an extent in a safetensors file: of the tensor's rank.
std::vector<std::int64_t> extent_shape(const Shape& shape, const CheckpointExtent& extent);

}  // namespace tessera
