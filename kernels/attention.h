// Causal grouped-query attention over packed documents. Tokens of one document are consecutive; a query
// attends to keys of its own document only. Bounds are cumulative lengths with a fixed number of
// entries; unused documents at the end have length zero. Where a document has fewer queries than keys
// (decoding, context parallelism) the queries are its last ones.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera {

struct AttentionShape {
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;   // divides heads_q; query head h reads key head h / (heads_q / heads_kv)
  std::int64_t head_dim = 0;
  std::int64_t window = 0;     // > 0: a query sees at most this many keys, itself included
  std::int64_t max_length = 0; // upper bound of a document's keys (static)
  float scale = 0;             // multiplies q.k; usually 1 / sqrt(head_dim)
};

struct AttentionForward {
  Tensor q;     // [Tq, heads_q * head_dim], rows may be strided
  Tensor k;     // [Tk, heads_kv * head_dim]
  Tensor v;     // [Tk, heads_kv * head_dim]
  Tensor out;   // [Tq, heads_q * head_dim]
  Tensor lse;   // [Tq, heads_q] fp32 (fp64 for fp64): log-sum-exp of the scaled scores; undefined when
                // no backward follows. Rows past the last document are left unwritten.
  Tensor cu_q;  // [max_documents + 1] int32, ascending from 0. Query rows past the last bound give 0.
  Tensor cu_k;  // the same for keys; may be the same tensor
  AttentionShape shape;
};

struct AttentionBackward {
  Tensor dout;
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  Tensor lse;
  Tensor dq;    // like q, k, v; every row is written (zeros past the last bound)
  Tensor dk;
  Tensor dv;
  Tensor cu_q;
  Tensor cu_k;
  AttentionShape shape;
  bool deterministic = true;
};

}  // namespace tessera
