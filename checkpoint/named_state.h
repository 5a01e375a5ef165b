// NamedState: everything a checkpoint holds of one named global tensor on this rank. Checkpoints see
// extents of global tensors, never layers, buckets or parallel layouts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/tensor.h"

namespace tessera {

// Rows [row_begin, + rows) of columns [col_begin, + cols) of the global tensor, held contiguously in
// `data` (flat, rows * cols elements, host or device). A rank-1 tensor is a column: cols == 1.
struct StatePiece {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
  Tensor data;  // pieces of no elements may leave it undefined
};

struct NamedState {
  std::string name;              // "weight/model.norm.weight", "adam_m/...", ...
  DType dtype = DType::kF32;     // as saved; on reading, a piece of another float dtype is converted
  Shape shape;                   // global, rank 1 or 2
  std::vector<StatePiece> pieces;
  // Where several ranks hold the same piece exactly one has `writes` set; all read it.
  bool writes = true;
  // No forward or backward pass changes it (weights, masters, moments): an asynchronous save may copy
  // it while they run. See CheckpointWriter::before_update.
  bool changes_only_in_update = false;
};

}  // namespace tessera
