// Element-wise maps, casts and column sums.
#pragma once

#include "engine/core/tensor.h"

namespace tessera {

// out = a + b. Any floating dtypes; computed in fp32 (fp64 if one is fp64). out may alias a or b.
struct Add {
  Tensor a;
  Tensor b;
  Tensor out;
};

// out = factor * in, converted to out's dtype (round to nearest even, FP8 saturates). out may alias in.
struct Scale {
  Tensor in;
  Tensor out;
  double factor = 1.0;
};

// out[j] (+)= sum over rows of in[i, j]: the gradient of a bias. Fixed order of summation.
struct ColumnSum {
  Tensor in;   // [T, n]
  Tensor out;  // [n]
  bool accumulate = false;
};

// out = sum over `count` parts of in, where part p is the p-th of `count` equal pieces of the dense
// tensor `in`, added in order of p in fp32 (fp64): the reduction of communicators.
struct SumParts {
  Tensor in;   // [count * n]
  Tensor out;  // [n], same dtype as in
  int count = 1;
  bool maximum = false;  // max instead of sum
};

}  // namespace tessera
