#include "models/attention.h"

#include "engine/memory/scratch.h"
#include "kernels/ops.h"
#include "parallel/context_split.h"

namespace tessera {
namespace {

// Copies rows between the order of the micro-batch and the order of memory after a gather: rank by
// rank, each with its pieces.
void reorder(const Tensor& from, const Tensor& to, const ContextSplit& split, bool to_ranks,
             Stream& stream) {
  for (int rank = 0; rank < split.size(); ++rank) {
    split.for_each_piece(rank, [&](std::int64_t place, std::int64_t own, std::int64_t count) {
      const std::int64_t in_memory = rank * split.tokens() + own;
      copy_tensor(from.row_slice(to_ranks ? place : in_memory, count),
                  to.row_slice(to_ranks ? in_memory : place, count), stream);
    });
  }
}

}  // namespace

// Keys and values of all tokens of the micro-batch, in their order.
class Attention::Keys {
 public:
  Keys(const Tensor& own, LayerContext& context)
      : split_(own.rows(), context.context_ranks.size()),
        whole_(context.stream, own.dtype, shape_if(is_split(), own)) {
    if (!is_split()) {
      values_ = own;
      return;
    }
    values_ = *whole_;
    const ScratchTensor gathered(context.stream, own.dtype, whole_->shape);
    const Tensor piece = own_rows(*gathered, context);
    scale(Scale{own, piece}, context.stream);
    context.context_ranks.all_gather(piece, *gathered, context.stream);
    reorder(*gathered, *whole_, split_, false, context.stream);
  }
  bool is_split() const { return split_.size() > 1; }
  const ContextSplit& split() const { return split_; }
  // [n T, 2 kv_cols]: k beside v.
  const Tensor& values() const { return values_; }

  // own [T, 2 kv_cols] = sums over the ranks of `gradients` [n T, 2 kv_cols], this rank's tokens.
  // Overwrites values().
  void return_gradients(const Tensor& gradients, const Tensor& own, LayerContext& context) const {
    reorder(gradients, *whole_, split_, true, context.stream);
    const Tensor piece = own_rows(*whole_, context);
    context.context_ranks.reduce_scatter(*whole_, piece, ReduceOp::kSum, context.stream);
    scale(Scale{piece, own}, context.stream);
  }

 private:
  Shape shape_if(bool is_needed, const Tensor& own) const {
    return is_needed ? Shape{split_.all_tokens(), own.cols()} : Shape{0};
  }
  Tensor own_rows(const Tensor& whole, const LayerContext& context) const {
    return whole.row_slice(context.context_ranks.rank() * split_.tokens(), split_.tokens());
  }

  ContextSplit split_;
  ScratchTensor whole_;
  Tensor values_;
};

AttentionForward Attention::arguments(const AttentionSaved& saved,
                                      const TokenContext& tokens) const {
  AttentionForward args;
  args.q = saved.qkv.col_slice(0, layout_.q_cols());
  args.k = saved.qkv.col_slice(layout_.q_cols(), layout_.kv_cols());
  args.v = saved.qkv.col_slice(layout_.q_cols() + layout_.kv_cols(), layout_.kv_cols());
  args.out = saved.out;
  args.lse = saved.lse;
  args.cu_q = tokens.documents;
  args.cu_k = tokens.documents;
  args.shape = shape_;
  args.shape.max_length = tokens.cos.rows();
  return args;
}

template <typename Body>
void Attention::for_each_piece(const AttentionSaved& saved, const Keys& keys,
                               const TokenContext& tokens, const LayerContext& context,
                               Body&& body) const {
  if (!keys.is_split()) return body(0, TokenRange{0, saved.qkv.rows()}, arguments(saved, tokens));
  const auto bounds = [&](int row) {
    const std::int64_t count = tokens.piece_bounds.cols();
    return tokens.piece_bounds.row_slice(row, 1).reshape(Shape{count});
  };
  const ContextSplit& split = keys.split();
  for (int i = 0; i < split.pieces(); ++i) {
    const TokenRange range = split.piece(context.context_ranks.rank(), i);
    const std::int64_t own = i * range.count();
    AttentionForward args = arguments(saved, tokens);
    args.q = args.q.row_slice(own, range.count());
    args.out = args.out.row_slice(own, range.count());
    args.lse = args.lse.row_slice(own, range.count());
    args.k = keys.values().col_slice(0, layout_.kv_cols()).row_slice(0, range.end);
    args.v = keys.values().col_slice(layout_.kv_cols(), layout_.kv_cols()).row_slice(0, range.end);
    args.cu_q = bounds(2 * i);
    // Of the first piece both are the same, which backends see by the memory.
    args.cu_k = range.begin == 0 ? args.cu_q : bounds(2 * i + 1);
    body(i, range, args);
  }
}

void Attention::forward(const AttentionSaved& saved, const TokenContext& tokens,
                        LayerContext& context) const {
  const Keys keys(key_values(saved.qkv), context);
  for_each_piece(saved, keys, tokens, context,
                 [&](int, const TokenRange&, const AttentionForward& args) {
                   attention_forward(args, context.stream);
                 });
}

void Attention::backward(const Tensor& dout, const AttentionSaved& saved, const Tensor& dqkv,
                         const TokenContext& tokens, LayerContext& context) const {
  const Keys keys(key_values(saved.qkv), context);
  // Of each piece: dk and dv of the keys up to its end. Early pieces end in the first half.
  const std::int64_t all = keys.is_split() ? keys.split().all_tokens() : 0;
  const std::int64_t cols = 2 * layout_.kv_cols();
  const ScratchTensor late(context.stream, dqkv.dtype, Shape{all, cols});
  const ScratchTensor early(context.stream, dqkv.dtype, Shape{all / 2, cols});
  for_each_piece(saved, keys, tokens, context,
                 [&](int i, const TokenRange& range, const AttentionForward& forward_args) {
                   const std::int64_t own = i * range.count();
                   const Tensor dkv = !keys.is_split()
                                          ? key_values(dqkv)
                                          : (i == 0 ? *early : *late).row_slice(0, range.end);
                   AttentionBackward args;
                   args.dout = dout.row_slice(own, range.count());
                   args.q = forward_args.q;
                   args.k = forward_args.k;
                   args.v = forward_args.v;
                   args.out = forward_args.out;
                   args.lse = forward_args.lse;
                   args.dq = dqkv.col_slice(0, layout_.q_cols()).row_slice(own, range.count());
                   args.dk = dkv.col_slice(0, layout_.kv_cols());
                   args.dv = dkv.col_slice(layout_.kv_cols(), layout_.kv_cols());
                   args.cu_q = forward_args.cu_q;
                   args.cu_k = forward_args.cu_k;
                   args.shape = forward_args.shape;
                   args.deterministic = context.deterministic;
                   attention_backward(args, context.stream);
                 });
  if (!keys.is_split()) return;
  const int rank = context.context_ranks.rank();
  const std::int64_t last = keys.split().piece(rank, 1).end;
  const Tensor unseen = late->row_slice(last, all - last);
  context.stream.set_zero(unseen.data, unseen.bytes());
  const std::int64_t seen = keys.split().piece(rank, 0).end;
  const Tensor sum = late->row_slice(0, seen);
  add(Add{sum, early->row_slice(0, seen), sum}, context.stream);
  keys.return_gradients(*late, key_values(dqkv), context);
}

}  // namespace tessera
