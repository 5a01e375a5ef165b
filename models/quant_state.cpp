#include "models/quant_state.h"

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Scalars that libraries read lie at multiples of 16 bytes.
constexpr std::int64_t kSpacing = 4;
constexpr std::int64_t kSlotsPerLinear = 2;
constexpr std::int64_t kLossCounts = 2;

}  // namespace

QuantState::QuantState(const QuantRegistry& registry, const ParamStore& params, Arena& arena, int sets)
    : recipe_(registry.recipe()), count_(static_cast<std::int64_t>(registry.linears().size())) {
  const std::int64_t count = count_;
  if (count == 0) return;
  CHECK(params.options().compute != DType::kF64,
        "[quant] FP8 products are not computed beside fp64");
  const auto scalars = [&](const char* name, std::int64_t number) {
    return arena.allocate(name, DType::kF32, Shape{number * kSpacing}, MemoryClass::kActivations);
  };
  const bool is_blockwise = recipe_.scaling == QuantScaling::kBlockwise;
  Tensor weight_amaxes;
  Tensor weight_scales;
  if (!is_blockwise) {
    amaxes_ = scalars("fp8 amaxes", sets * count * kSlotsPerLinear);
    scales_ = scalars("fp8 scales", sets * count * kSlotsPerLinear);
    weight_amaxes = scalars("fp8 weight amaxes", count);
    weight_scales = scalars("fp8 weight scales", count);
  }
  losses_ = arena.allocate("fp8 cast losses", DType::kI64, Shape{count * kSlotsPerLinear * kLossCounts},
                           MemoryClass::kInput);
  for (std::int64_t i = 0; i < count; ++i) {
    WeightCopies weight;
    weight.linear = registry.linears()[static_cast<std::size_t>(i)];
    const std::string& name = params.spec(weight.linear.weight).name;
    const Shape shape = params.matrix_shape(weight.linear.weight, weight.linear.count);
    if (params.gathers_codes(weight.linear.weight.bucket)) {
      weights_.push_back(weight);
      continue;
    }
    const auto take = [&](const char* what, DType dtype, Shape copy) {
      return arena.allocate(fmt::format("fp8 {} of {}", what, name), dtype, copy,
                            MemoryClass::kWeights);
    };
    const auto take_scales = [&](const char* what, const Tensor& copy) {
      return take(what, DType::kF32, scale_shape(ScaleMode::kBlock, copy.rows(), copy.cols()));
    };
    weight.copies.row = take("rows", recipe_.forward, shape);
    if (params.options().trains)
      weight.copies.column = take("columns", recipe_.forward, Shape{shape[1], shape[0]});
    if (is_blockwise) {
      weight.copies.mode = ScaleMode::kBlock;
      weight.copies.row_scale = take_scales("row scales", weight.copies.row);
      if (weight.copies.column.defined())
        weight.copies.column_scale = take_scales("column scales", weight.copies.column);
    } else {
      weight.copies.amax = weight_amaxes.flat_slice(i * kSpacing, 1);
      weight.copies.scale = weight_scales.flat_slice(i * kSpacing, 1);
    }
    weights_.push_back(weight);
  }
}

GemmOperand QuantState::slot(int linear, int which) const {
  GemmOperand operand;
  if (linear < 0) return operand;
  if (recipe_.scaling == QuantScaling::kBlockwise) {
    operand.mode = ScaleMode::kVector;
    return operand;
  }
  const std::int64_t index = ((set_ * count_ + linear) * kSlotsPerLinear + which) * kSpacing;
  operand.amax = amaxes_.flat_slice(index, 1);
  operand.scale = scales_.flat_slice(index, 1);
  return operand;
}

Tensor QuantState::losses_of(int linear, int which) const {
  if (linear < 0 || !watches_losses_) return {};
  return losses_.flat_slice((linear * kSlotsPerLinear + which) * kLossCounts, kLossCounts);
}

void QuantState::watch_losses(bool watches, Stream& stream) {
  watches_losses_ = watches && losses_.defined();
  if (watches_losses_) stream.set_zero(losses_.data, losses_.bytes());
}

void QuantState::begin_pass(Stream& stream) const {
  if (!amaxes_.defined()) return;
  const std::int64_t size = count_ * kSlotsPerLinear * kSpacing;
  const Tensor own = amaxes_.flat_slice(set_ * size, size);
  stream.set_zero(own.data, own.bytes());
}

GemmOperand QuantState::weight(int linear, const ParamStore& params, Stream& stream) {
  WeightCopies& weight = weights_[static_cast<std::size_t>(linear)];
  GemmOperand operand = weight.copies;
  if (params.gathers_codes(weight.linear.weight.bucket)) {
    const ParamStore::Codes codes = params.codes(weight.linear.weight);
    operand.row = codes.rows;
    operand.scale = codes.scale;
    return operand;
  }
  operand.plain = params.fused_weight(weight.linear.weight, weight.linear.count);
  const std::uint64_t version = params.weight_version(weight.linear.weight.bucket);
  if (weight.version != version) {
    if (!operand.has_block_scales()) {
      stream.set_zero(operand.amax.data, operand.amax.bytes());
      amax(Amax{operand.plain, operand.amax}, stream);
    }
    quantize(operand, stream);
    weight.version = version;
  }
  return operand;
}

}  // namespace tessera
