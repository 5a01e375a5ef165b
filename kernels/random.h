// Counter-based initial values of a piece of a parameter.
#pragma once

#include <cstdint>

#include "engine/core/philox.h"
#include "engine/core/tensor.h"

namespace tessera {

// out is the piece starting at (first_row, first_col) of a [*, global_cols] tensor; element (i, j) gets
// mean + std * normal(key, (first_row + i) * global_cols + first_col + j). std 0 fills with mean.
struct FillNormal {
  Tensor out;  // [rows, cols], or [n] as one row
  PhiloxKey key;
  std::int64_t first_row = 0;
  std::int64_t first_col = 0;
  std::int64_t global_cols = 0;
  float mean = 0;
  float std = 0;
};

}  // namespace tessera
