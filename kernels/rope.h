// Rotary position embedding on the packed projection [q | k | v], with the optional per-head RMS norm
// of q and k before it (Qwen3). Rotation pairs element i with i + rotary_dim / 2 ("rotate half", the
// Hugging Face convention); elements past rotary_dim pass through.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera {

// How the columns of a packed projection are cut: heads_q, then heads_kv of k, then heads_kv of v,
// each head_dim wide.
struct QkvLayout {
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t q_cols() const { return heads_q * head_dim; }
  std::int64_t kv_cols() const { return heads_kv * head_dim; }
  std::int64_t cols() const { return (heads_q + 2 * heads_kv) * head_dim; }
};

// cos, sin: [positions, rotary_dim / 2] fp32 (fp64 for fp64), the attention factor included.
struct QkvRopeForward {
  Tensor in;         // [T, layout.cols()]
  Tensor out;        // same; may alias `in` when there is no q/k norm. v is copied unless aliased.
  Tensor cos;
  Tensor sin;
  Tensor positions;  // [T] int32
  Tensor q_norm;     // [head_dim] or undefined (both or none)
  Tensor k_norm;     // [head_dim]
  Tensor rstd;       // [T, heads_q + heads_kv] fp32 (fp64): written with q/k norm; needed by backward
  QkvLayout layout;
  float eps = 1e-6f;
};

// In place on d: in goes d(out), out comes d(in). With q/k norm also dq_norm, dk_norm (+)=.
struct QkvRopeBackward {
  Tensor d;          // [T, layout.cols()]
  Tensor in;         // the forward's input; needed with q/k norm only
  Tensor cos;
  Tensor sin;
  Tensor positions;
  Tensor q_norm;
  Tensor k_norm;
  Tensor rstd;
  Tensor dq_norm;    // [head_dim], dtype of d or fp32; undefined when frozen
  Tensor dk_norm;
  bool accumulate_dq_norm = false;
  bool accumulate_dk_norm = false;
  QkvLayout layout;
};

}  // namespace tessera
