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
      : operand_(source), row_(source, source.is_quantized(), format, source.plain.shape, context) {
    if (source.is_quantized()) {
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

// The pieces [T / tp, n] of all ranks as one operand [T, n]: its row copy where a quantised one has
// one scale on all ranks (agree_on_amax), else plain: both copies with scales of blocks are cast
// from the whole.
class Gathered {
 public:
  Gathered(const GemmOperand& piece, LayerContext& context)
      : whole_(context.stream, payload(piece).dtype,
               Shape{whole_rows(payload(piece), context), payload(piece).cols()}) {
    context.tensor.all_gather(payload(piece), *whole_, context.stream);
    operand_.amax = piece.amax;
    operand_.scale = piece.scale;
    operand_.mode = piece.mode;
    (gathers_rows(piece) ? operand_.row : operand_.plain) = *whole_;
  }
  const GemmOperand& operand() const { return operand_; }

 private:
  static bool gathers_rows(const GemmOperand& piece) {
    return piece.is_quantized() && !piece.has_block_scales();
  }
  static const Tensor& payload(const GemmOperand& piece) {
    return gathers_rows(piece) ? piece.row : piece.plain;
  }
  ScratchTensor whole_;
  GemmOperand operand_;
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

void LocalLinear::backward_input(const GemmOperand& dy, const Tensor& dx,
                                 LayerContext& context) const {
  Gemm args;
  args.c = dx;
  args.fast_accumulation = context.quant.recipe().fast_gradients;
  multiply_nn(dy, weight(context), args, context.stream);
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
    quantize(row.operand(), context.stream);
    local_.forward(row.operand(), y, true, context);
    return;
  }
  agree_on_amax(x, context);
  keep_input(x, context);
  const Gathered whole(x, context);
  if (!x.has_block_scales()) return local_.forward(whole.operand(), y, true, context);
  const ScratchRow row(whole.operand(), context.quant.recipe().forward, context);
  quantize(row.operand(), context.stream);
  local_.forward(row.operand(), y, true, context);
}

void ColumnParallelLinear::backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                                    LayerContext& context) const {
  local_.backward_bias(dy.plain, context);
  const ScratchCopies gradient(dy, context.quant.recipe().gradient, context);
  quantize(gradient.operand(), context.stream);
  if (!is_split(context)) {
    local_.backward_input(gradient.operand(), dx, context);
    context.tensor.all_reduce(dx, ReduceOp::kSum, context.stream);
    local_.backward_weight(x, gradient.operand(), context);
    return;
  }
  const Gathered x_whole(x, context);
  const ScratchTensor dx_whole(context.stream, dx.dtype, Shape{whole_rows(dx, context), dx.cols()});
  local_.backward_input(gradient.operand(), *dx_whole, context);
  context.tensor.reduce_scatter(*dx_whole, dx, ReduceOp::kSum, context.stream);
  if (x.has_block_scales()) {
    const ScratchColumn x_columns(x_whole.operand(), context.quant.recipe().forward, context);
    quantize(x_columns.operand(), context.stream);
    return local_.backward_weight(x_columns.operand(), gradient.operand(), context);
  }
  const Transposed x_columns(x_whole.operand(), context);
  local_.backward_weight(x_columns.operand(), gradient.operand(), context);
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
  const ScratchRow row(x, context.quant.recipe().forward, context);
  quantize(row.operand(), context.stream);
  if (!is_split(context)) {
    local_.forward(row.operand(), y, adds_bias, context);
    context.tensor.all_reduce(y, ReduceOp::kSum, context.stream);
    return;
  }
  const ScratchTensor whole(context.stream, y.dtype, Shape{whole_rows(y, context), y.cols()});
  local_.forward(row.operand(), *whole, adds_bias, context);
  context.tensor.reduce_scatter(*whole, y, ReduceOp::kSum, context.stream);
}

void RowParallelLinear::backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                                 LayerContext& context) const {
  local_.backward_bias(dy.plain, context);
  if (!is_split(context)) {
    const ScratchCopies gradient(dy, context.quant.recipe().gradient, context);
    quantize(gradient.operand(), context.stream);
    local_.backward_input(gradient.operand(), dx, context);
    local_.backward_weight(x, gradient.operand(), context);
    return;
  }
  if (dy.has_block_scales()) {
    const Gathered whole(dy, context);
    const ScratchCopies gradient(whole.operand(), context.quant.recipe().gradient, context);
    quantize(gradient.operand(), context.stream);
    local_.backward_input(gradient.operand(), dx, context);
    local_.backward_weight(x, gradient.operand(), context);
    return;
  }
  agree_on_amax(dy, context);
  const ScratchRow piece(dy, context.quant.recipe().gradient, context);
  quantize(piece.operand(), context.stream);
  const Gathered whole(piece.operand(), context);
  local_.backward_input(whole.operand(), dx, context);
  const Transposed columns(whole.operand(), context);
  local_.backward_weight(x, columns.operand(), context);
}

}  // namespace tessera
