// SwiGLU (Shazeer 2020): out = silu(gate) * up on the packed projection [gate | up].
#pragma once

#include "engine/core/tensor.h"

namespace tessera {

struct SwiGluForward {
  Tensor gate_up;  // [T, 2 * ffn]
  Tensor out;      // [T, ffn]
  Tensor amax;     // [1] fp32 or undefined: records the largest |out| as stored, see Amax
};

struct SwiGluBackward {
  Tensor dout;      // [T, ffn]
  Tensor gate_up;   // [T, 2 * ffn]
  Tensor dgate_up;  // [T, 2 * ffn]; may alias gate_up
  Tensor amax;      // [1] fp32 or undefined: records the largest |dgate_up| as stored, see Amax
};

}  // namespace tessera
