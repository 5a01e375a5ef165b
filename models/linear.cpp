#include "models/linear.h"

#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

bool is_split(const LayerContext& context) {
  return context.sequence_parallel && context.tensor.size() > 1;
}

// Rows of the whole sequence behind a tensor that holds this rank's piece.
std::int64_t whole_rows(const Tensor& piece, const LayerContext& context) {
  return piece.rows() * context.tensor.size();
}

// Of a tensor of all ranks' rows, those of the rank whose rows `piece` holds.
Tensor rows_of(const Tensor& whole, int rank, const Tensor& piece) {
  return whole.row_slice(rank * piece.rows(), piece.rows());
}

// The copies that an operand has only while a product reads them lie in scratch; a plain operand
// gets none.

// A copy and, where it has scales of blocks, these.
class ScratchCopy {
 public:
  // Nothing where `is_needed` does not hold.
  ScratchCopy(const GemmOperand& source, bool is_needed, DType format, Shape shape,
              LayerContext& context)
      : copy_(context.stream, format, is_needed ? shape : Shape{0}),
        scale_(context.stream, DType::kF32,
               is_needed && source.has_block_scales()
                   ? scale_shape(source.mode, shape.rows(), shape.cols())
                   : Shape{0}) {}
  const Tensor& copy() const { return *copy_; }
  // Undefined with one scale per tensor.
  Tensor scale() const { return scale_->numel() > 0 ? *scale_ : Tensor{}; }

 private:
  ScratchTensor copy_;
  ScratchTensor scale_;
};

// A row copy beside the column copy that the operand has, if that is to be written.
class ScratchRow {
 public:
  ScratchRow(const GemmOperand& source, DType format, LayerContext& context)
      : ScratchRow(source, source.is_quantized(), format, context) {}
  // No row copy where `is_needed` does not hold.
  ScratchRow(const GemmOperand& source, bool is_needed, DType format, LayerContext& context)
      : operand_(source), row_(source, is_needed, format, source.plain.shape, context) {
    if (is_needed) {
      operand_.row = row_.copy();
      operand_.row_scale = row_.scale();
    }
    if (!context.keeps_inputs) operand_.column = operand_.column_scale = Tensor{};
  }
  const GemmOperand& operand() const { return operand_; }

 private:
  GemmOperand operand_;
  ScratchCopy row_;
};

// A column copy beside what the operand has.
class ScratchColumn {
 public:
  ScratchColumn(const GemmOperand& source, DType format, LayerContext& context)
      : operand_(source),
        column_(source, source.is_quantized(), format,
                Shape{source.plain.cols(), fp8_depth(source.plain.rows())}, context) {
    if (!source.is_quantized()) return;
    operand_.column = column_.copy();
    operand_.column_scale = column_.scale();
  }
  const GemmOperand& operand() const { return operand_; }

 private:
  GemmOperand operand_;
  ScratchCopy column_;
};

// A row and a column copy.
class ScratchCopies {
 public:
  ScratchCopies(const GemmOperand& source, DType format, LayerContext& context)
      : row_(source, format, context), column_(row_.operand(), format, context) {}
  const GemmOperand& operand() const { return column_.operand(); }

 private:
  ScratchRow row_;
  ScratchColumn column_;
};

// Some rows of an operand, as a product along its columns reads them: with scales of blocks cast
// here, since those of a row copy lie column by column and cannot be cut.
class RowsOfOperand {
 public:
  RowsOfOperand(const GemmOperand& rows, DType format, LayerContext& context)
      : row_(rows, rows.has_block_scales(), format, context) {
    if (rows.has_block_scales()) quantize(row_.operand(), context.stream);
  }
  const GemmOperand& operand() const { return row_.operand(); }

 private:
  ScratchRow row_;
};

// The pieces [T / tp, n] of all ranks as one operand [T, n]: its row copy where a quantised one has
// one scale on all ranks (agree_on_amax), else plain: both copies with scales of blocks are cast
// from the whole.
class Gathered {
 public:
  Gathered(const GemmOperand& piece, LayerContext& context)
      : piece_(piece),
        whole_(context.stream, payload(piece).dtype,
               Shape{whole_rows(payload(piece), context), payload(piece).cols()}) {}

  // Gathers; product(rank, rows) enqueues what is computed of each rank's rows, once they are here.
  template <typename Product>
  void multiply(DType format, LayerContext& context, Product&& product) const {
    context.overlap.gather_gemm(payload(piece_), *whole_, [&](int rank, const Tensor& rows) {
      const RowsOfOperand operand(operand_of(rows), format, context);
      product(rank, operand.operand());
    });
  }
  // Gathers behind what the compute stream is given between the two.
  void start(LayerContext& context) const { context.overlap.start_gather(payload(piece_), *whole_); }
  void finish(LayerContext& context) const { context.overlap.finish_gather(); }
  GemmOperand operand() const { return operand_of(*whole_); }

 private:
  static bool gathers_rows(const GemmOperand& piece) {
    return piece.is_quantized() && !piece.has_block_scales();
  }
  static const Tensor& payload(const GemmOperand& piece) {
    return gathers_rows(piece) ? piece.row : piece.plain;
  }
  GemmOperand operand_of(const Tensor& rows) const {
    GemmOperand operand;
    operand.amax = piece_.amax;
    operand.scale = piece_.scale;
    operand.mode = piece_.mode;
    (gathers_rows(piece_) ? operand.row : operand.plain) = rows;
    return operand;
  }

  GemmOperand piece_;
  ScratchTensor whole_;
};

// Adds the column copy to an operand whose rows were gathered: the same bytes transposed.
class Transposed {
 public:
  Transposed(const GemmOperand& rows, LayerContext& context)
      : column_(
            context.stream, rows.is_quantized() ? rows.row.dtype : DType::kU8,
            rows.is_quantized() ? Shape{rows.row.cols(), fp8_depth(rows.row.rows())} : Shape{0}),
        operand_(rows) {
    if (!rows.is_quantized()) return;
    transpose(Transpose{rows.row, *column_}, context.stream);
    operand_.column = *column_;
  }
  const GemmOperand& operand() const { return operand_; }

 private:
  ScratchTensor column_;
  GemmOperand operand_;
};

// A weight as the gradient of the input reads it: where ZeRO 3 gathers codes these come as rows, and
// are transposed here.
class BackwardWeight {
 public:
  BackwardWeight(const LocalLinear& linear, LayerContext& context)
      : operand_(linear.weight(context)), column_(context.stream, format(), shape()) {
    if (!lacks_column()) return;
    transpose(Transpose{operand_.row, *column_}, context.stream);
    operand_.column = *column_;
  }
  const GemmOperand& operand() const { return operand_; }

 private:
  bool lacks_column() const { return operand_.is_quantized() && !operand_.column.defined(); }
  DType format() const { return lacks_column() ? operand_.row.dtype : DType::kU8; }
  Shape shape() const {
    return lacks_column() ? Shape{operand_.row.cols(), operand_.row.rows()} : Shape{0};
  }

  GemmOperand operand_;
  ScratchTensor column_;
};

// One amax for the pieces of all ranks.
void agree_on_amax(const GemmOperand& piece, LayerContext& context) {
  const Tensor amax = amax_to_record(piece, context);
  if (amax.defined()) context.tensor.all_reduce(amax, ReduceOp::kMax, context.stream);
}

// Memory of the column copy of an input [T, in], and of its scales.
void plan_column(GemmOperand& x, const std::string& name, const QuantState& quant, Arena& arena) {
  const Shape shape{x.plain.cols(), fp8_depth(x.plain.rows())};
  x.column = arena.allocate(name + " fp8 columns", quant.recipe().forward, shape,
                            MemoryClass::kActivations);
  if (!x.has_block_scales()) return;
  x.column_scale =
      arena.allocate(name + " fp8 column scales", DType::kF32,
                     scale_shape(x.mode, shape.rows(), shape.cols()), MemoryClass::kActivations);
}

}  // namespace

GemmOperand LocalLinear::input(const Tensor& x, const QuantState& quant) const {
  GemmOperand operand = quant.input(quant_);
  operand.plain = x;
  return operand;
}

GemmOperand LocalLinear::output_gradient(const Tensor& dy, const QuantState& quant) const {
  GemmOperand operand = quant.gradient(quant_);
  operand.plain = dy;
  return operand;
}

void LocalLinear::cast_input(const GemmOperand& x, LayerContext& context) const {
  quantize(x, context.stream);
  count_losses(x, context.quant.input_losses(quant_), context.stream);
}

void LocalLinear::cast_gradient(const GemmOperand& dy, LayerContext& context) const {
  quantize(dy, context.stream);
  count_losses(dy, context.quant.gradient_losses(quant_), context.stream);
}

GemmOperand LocalLinear::weight(LayerContext& context) const {
  if (is_quantized()) return context.quant.weight(quant_, context.params, context.stream);
  GemmOperand operand;
  operand.plain = context.params.fused_weight(weight_, fused_);
  return operand;
}

void LocalLinear::forward(const GemmOperand& x, const Tensor& y, bool add_bias,
                          LayerContext& context) const {
  Gemm args;
  args.c = y;
  args.fast_accumulation = true;
  if (add_bias && has_bias()) args.bias = context.params.fused_weight(bias_, fused_);
  multiply_nt(x, weight(context), args, context.stream);
}

void LocalLinear::backward_input(const GemmOperand& dy, const GemmOperand& weight, const Tensor& dx,
                                 LayerContext& context) const {
  Gemm args;
  args.c = dx;
  args.fast_accumulation = context.quant.recipe().fast_gradients;
  multiply_nn(dy, weight, args, context.stream);
}

void LocalLinear::backward_weight(const GemmOperand& x, const GemmOperand& dy,
                                  LayerContext& context) const {
  const GradientTarget target = context.params.fused_gradient(weight_, fused_);
  Gemm args;
  args.c = target.tensor;
  args.accumulate = target.accumulate;
  args.fast_accumulation = context.quant.recipe().fast_gradients;
  multiply_tn(dy, x, args, context.stream);
}

void LocalLinear::backward_bias(const Tensor& dy, LayerContext& context) const {
  if (!has_bias()) return;
  const GradientTarget target = context.params.fused_gradient(bias_, fused_);
  column_sum(ColumnSum{dy, target.tensor, target.accumulate}, context.stream);
}

GemmOperand ParallelLinear::input(const Tensor& x, const GemmOperand& from,
                                  const QuantState& quant) const {
  GemmOperand operand = local_.input(x, quant);
  operand.row = from.row;
  operand.column = from.column;
  operand.row_scale = from.row_scale;
  operand.column_scale = from.column_scale;
  return operand;
}

bool ColumnParallelLinear::keeps_plain(const QuantState& quant) const {
  return splits_tokens_ && is_quantized() && quant.recipe().scaling == QuantScaling::kBlockwise;
}

ColumnParallelLinear::ColumnParallelLinear(ParamRegistry& registry, QuantRegistry& quant,
                                           int bucket, const std::vector<ColumnPart>& parts,
                                           const LinearOptions& options)
    : splits_tokens_(options.sequence_parallel) {
  const auto declare = [&](const char* suffix, bool is_weight) {
    ParamId first;
    for (const ColumnPart& part : parts) {
      ParamSpec spec;
      spec.name = part.name + suffix;
      spec.shape = is_weight ? Shape{part.rows, options.in_features} : Shape{part.rows};
      spec.placement = part.groups > 0 ? Placement::in_groups(part.groups)
                                       : Placement::sharded(0, options.quantum);
      spec.gradient_sum = part.groups > 0 ? GradientSum::kCopies : GradientSum::kNone;
      spec.init_std = is_weight ? options.init_std : 0.0f;
      spec.decay = is_weight;
      spec.follows_previous = first.defined();
      const ParamId id = registry.add(bucket, std::move(spec));
      if (!first.defined()) first = id;
    }
    return first;
  };
  const ParamId weight = declare(".weight", true);
  const ParamId bias = options.bias ? declare(".bias", false) : ParamId{};
  const int count = static_cast<int>(parts.size());
  local_ = LocalLinear(weight, bias, count, quant.add(registry, weight, count));
}

GemmOperand ColumnParallelLinear::plan_input(const Tensor& x, const std::string& name,
                                             const QuantState& quant, bool trains,
                                             Arena& arena) const {
  GemmOperand operand = local_.input(x, quant);
  if (!is_quantized()) return operand;
  if (keeps_plain(quant)) return operand;
  if (splits_tokens_) {
    // What is gathered, in the forward and again in the backward: rows at half the bytes.
    operand.row = arena.allocate(name + " fp8 rows", quant.recipe().forward, x.shape,
                                 MemoryClass::kActivations);
  } else if (trains) {
    plan_column(operand, name, quant, arena);
  }
  return operand;
}

void ColumnParallelLinear::forward(const GemmOperand& x, const Tensor& y,
                                   LayerContext& context) const {
  if (!is_split(context)) {
    const ScratchRow row(x, context.quant.recipe().forward, context);
    local_.cast_input(row.operand(), context);
    local_.forward(row.operand(), y, true, context);
    return;
  }
  agree_on_amax(x, context);
  keep_input(x, context);
  const Gathered whole(x, context);
  whole.multiply(context.quant.recipe().forward, context, [&](int rank, const GemmOperand& rows) {
    local_.forward(rows, y.row_slice(rank * x.plain.rows(), x.plain.rows()), true, context);
  });
}

void ColumnParallelLinear::backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                                    LayerContext& context) const {
  local_.backward_bias(dy.plain, context);
  const ScratchCopies gradient(dy, context.quant.recipe().gradient, context);
  local_.cast_gradient(gradient.operand(), context);
  if (!is_split(context)) {
    local_.backward_input(gradient.operand(), BackwardWeight(local_, context).operand(), dx, context);
    context.tensor.all_reduce(dx, ReduceOp::kSum, context.stream);
    local_.backward_weight(x, gradient.operand(), context);
    return;
  }
  // x arrives behind the product for dx, which leaves behind the one for the weights.
  const Gathered x_whole(x, context);
  x_whole.start(context);
  const ScratchTensor dx_whole(context.stream, dx.dtype, Shape{whole_rows(dx, context), dx.cols()});
  local_.backward_input(gradient.operand(), BackwardWeight(local_, context).operand(), *dx_whole, context);
  context.overlap.start_scatter(*dx_whole, dx);
  x_whole.finish(context);
  backward_weight(x_whole.operand(), gradient.operand(), context);
  context.overlap.finish_scatter();
}

void ColumnParallelLinear::backward_weight(const GemmOperand& x_whole, const GemmOperand& dy,
                                           LayerContext& context) const {
  if (x_whole.has_block_scales()) {
    const ScratchColumn columns(x_whole, context.quant.recipe().forward, context);
    quantize(columns.operand(), context.stream);
    return local_.backward_weight(columns.operand(), dy, context);
  }
  const Transposed columns(x_whole, context);
  local_.backward_weight(columns.operand(), dy, context);
}

RowParallelLinear::RowParallelLinear(ParamRegistry& registry, QuantRegistry& quant, int bucket,
                                     const std::string& name, std::int64_t out_features,
                                     const LinearOptions& options) {
  ParamSpec spec;
  spec.name = name + ".weight";
  spec.shape = Shape{out_features, options.in_features};
  spec.placement = Placement::sharded(1, options.quantum);
  spec.init_std = options.init_std;
  spec.decay = true;
  const ParamId weight = registry.add(bucket, std::move(spec));
  ParamId bias;
  if (options.bias) {
    ParamSpec bias_spec;
    bias_spec.name = name + ".bias";
    bias_spec.shape = Shape{out_features};
    // Under sequence parallelism each rank sees the output gradient of its own tokens only.
    bias_spec.gradient_sum = options.sequence_parallel ? GradientSum::kTensor : GradientSum::kNone;
    bias = registry.add(bucket, std::move(bias_spec));
  }
  local_ = LocalLinear(weight, bias, 1, quant.add(registry, weight, 1));
}

GemmOperand RowParallelLinear::plan_input(const Tensor& x, const std::string& name,
                                          const QuantState& quant, bool trains,
                                          Arena& arena) const {
  GemmOperand operand = local_.input(x, quant);
  if (is_quantized() && trains) plan_column(operand, name, quant, arena);
  return operand;
}

void RowParallelLinear::forward(const GemmOperand& x, const Tensor& y,
                                LayerContext& context) const {
  const bool adds_bias = context.tensor.rank() == 0;  // the sum over tp counts it once
  const DType format = context.quant.recipe().forward;
  if (!is_split(context)) {
    const ScratchRow row(x, format, context);
    local_.cast_input(row.operand(), context);
    local_.forward(row.operand(), y, adds_bias, context);
    context.tensor.all_reduce(y, ReduceOp::kSum, context.stream);
    return;
  }
  const ScratchRow row(x, x.is_quantized() && !x.has_block_scales(), format, context);
  local_.cast_input(row.operand(), context);
  context.overlap.gemm_scatter(y, [&](int rank, const Tensor& summand) {
    GemmOperand rows = row.operand();
    rows.column = rows.column_scale = Tensor{};
    rows.plain = rows_of(rows.plain, rank, summand);
    if (rows.row.defined()) rows.row = rows_of(rows.row, rank, summand);
    const RowsOfOperand operand(rows, format, context);
    local_.forward(operand.operand(), summand, adds_bias, context);
  });
}

void RowParallelLinear::backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                                 LayerContext& context) const {
  local_.backward_bias(dy.plain, context);
  if (!is_split(context)) {
    const ScratchCopies gradient(dy, context.quant.recipe().gradient, context);
    local_.cast_gradient(gradient.operand(), context);
    local_.backward_input(gradient.operand(), BackwardWeight(local_, context).operand(), dx, context);
    local_.backward_weight(x, gradient.operand(), context);
    return;
  }
  const DType format = context.quant.recipe().gradient;
  agree_on_amax(dy, context);
  const ScratchRow piece(dy, dy.is_quantized() && !dy.has_block_scales(), format, context);
  local_.cast_gradient(piece.operand(), context);
  const Gathered whole(piece.operand(), context);
  const BackwardWeight weight(local_, context);
  whole.multiply(format, context, [&](int rank, const GemmOperand& rows) {
    local_.backward_input(rows, weight.operand(), dx.row_slice(rank * dy.plain.rows(), dy.plain.rows()), context);
  });
  if (dy.has_block_scales()) {
    const ScratchColumn columns(whole.operand(), format, context);
    quantize(columns.operand(), context.stream);
    return local_.backward_weight(x, columns.operand(), context);
  }
  const Transposed columns(whole.operand(), context);
  local_.backward_weight(x, columns.operand(), context);
}

}  // namespace tessera
