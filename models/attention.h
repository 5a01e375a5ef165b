// The attention of a block over its packed projection [q | k | v], with the exchange of keys and
// values under context parallelism: a rank holds two pieces of the tokens
// (parallel/context_split.h) and its queries need the keys in front of them on every rank. The
// forward gathers k and v of the micro-batch, and so does the backward, instead of keeping them; it
// adds up dk and dv of both pieces and returns each rank the sums over the group of its own tokens.
//
//   forward    k, v [T] -> all-gather [n T] -> a call for each piece, keys up to its end
//   backward   again all-gather -> a call for each piece -> dk, dv [n T] -> reduce-scatter [T]
#pragma once

#include "kernels/attention.h"
#include "kernels/rope.h"
#include "models/layer_context.h"

namespace tessera {

// What is common to the tokens of a micro-batch.
struct TokenContext {
  Tensor positions;  // [T] int32
  Tensor documents;  // [max_documents + 1] int32 cumulative lengths, of the whole micro-batch
  // [2 pieces x {queries, keys}, max_documents + 1] int32: see piece_bounds(). Undefined in a group
  // of one.
  Tensor piece_bounds;
  Tensor cos;  // [max position, rotary_dim / 2]
  Tensor sin;
};

// What attention's backward needs: the rotated projection and what the forward wrote.
struct AttentionSaved {
  Tensor qkv;  // [T, layout.cols()]
  Tensor out;  // [T, layout.q_cols()]
  Tensor lse;  // [T, heads_q]
};

class Attention {
 public:
  Attention() = default;
  // `shape` without max_length.
  Attention(const QkvLayout& layout, const AttentionShape& shape)
      : layout_(layout), shape_(shape) {}

  // Writes saved.out and saved.lse.
  void forward(const AttentionSaved& saved, const TokenContext& tokens,
               LayerContext& context) const;
  // dqkv [T, layout.cols()] of the rotated projection from dout [T, layout.q_cols()].
  void backward(const Tensor& dout, const AttentionSaved& saved, const Tensor& dqkv,
                const TokenContext& tokens, LayerContext& context) const;
  // The arguments of a call over all tokens of a group of one.
  AttentionForward arguments(const AttentionSaved& saved, const TokenContext& tokens) const;

 private:
  class Keys;
  // Of all pieces, one after another.
  template <typename Body>
  void for_each_piece(const AttentionSaved& saved, const Keys& keys, const TokenContext& tokens,
                      const LayerContext& context, Body&& body) const;
  Tensor key_values(const Tensor& qkv) const {
    return qkv.col_slice(layout_.q_cols(), 2 * layout_.kv_cols());
  }

  QkvLayout layout_;
  AttentionShape shape_;
};

}  // namespace tessera
