// Root-mean-square norm with the residual addition in front of it (Zhang & Sennrich 2019):
//   s = x + delta;  out = s * rstd * weight,  rstd = 1 / sqrt(mean(s^2) + eps).
#pragma once

#include "engine/core/tensor.h"

namespace tessera {

struct RmsNormForward {
  Tensor x;       // [T, hidden]
  Tensor delta;   // [T, hidden] or undefined
  Tensor weight;  // [hidden]
  Tensor sum;     // [T, hidden]: x + delta; required with delta, may alias x or delta
  Tensor out;     // [T, hidden]
  Tensor rstd;    // [T] fp32 (fp64 for fp64), or undefined when no backward follows
  float eps = 1e-5f;
  Tensor amax;  // [1] fp32 or undefined: records the largest |out| as stored, see Amax
};

// dx = dsum + d(norm)/ds . dout;  dweight (+)= sum over t of dout * s * rstd.
struct RmsNormBackward {
  Tensor dout;     // [T, hidden]
  Tensor s;        // [T, hidden]: the normalised input (x + delta)
  Tensor weight;   // [hidden]
  Tensor rstd;     // [T]
  Tensor dsum;     // [T, hidden] gradient that reaches s by the residual path, or undefined
  Tensor dx;       // [T, hidden]; may alias dsum
  Tensor dweight;  // [hidden], dtype of s or fp32; undefined when the weight is frozen
  bool accumulate_dweight = false;
  Tensor amax;  // [1] fp32 or undefined: records the largest |dx| as stored, see Amax
};

}  // namespace tessera
