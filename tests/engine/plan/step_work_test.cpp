// The work of a step against counts by hand.
#include "engine/plan/step_work.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

ModelConfig small_model() {
  ModelConfig model;
  model.vocab_size = 1000;
  model.hidden_size = 128;
  model.intermediate_size = 320;
  model.num_hidden_layers = 3;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 32;
  model.max_position_embeddings = 256;
  return model;
}

RuntimeOptions options_of(const ModelConfig&, int tensor) {
  RuntimeOptions options;
  options.geometry = batch_geometry(2, 64, 2, DType::kBF16, tensor, tensor > 1);
  options.sequence_parallel = tensor > 1;
  options.params.compute = DType::kBF16;
  options.params.gradients = options.params.moments = DType::kBF16;
  options.params.fp32_masters = false;
  return options;
}

// Elements of all matrices that a token is multiplied with.
double matrix_elements(const ModelConfig& m) {
  const double h = static_cast<double>(m.hidden_size);
  const double q = static_cast<double>(m.num_attention_heads * m.head_dim);
  const double kv = static_cast<double>(m.num_key_value_heads * m.head_dim);
  const double block = h * (q + 2 * kv) + q * h + 3 * h * static_cast<double>(m.intermediate_size);
  return static_cast<double>(m.num_hidden_layers) * block + h * static_cast<double>(m.vocab_size);
}

TEST(StepWork, ProductsAreSixOperationsAMatrixElementAndToken) {
  const ModelConfig model = small_model();
  const StepWork work = step_work(model, MeshShape{}, options_of(model, 1), 5, 0);
  const double tokens = 5 * 2 * 64;
  EXPECT_DOUBLE_EQ(work.product_flops(false), 6 * matrix_elements(model) * tokens);
  EXPECT_EQ(work.product_flops(true), 0);
  EXPECT_EQ(work.fp8_share(), 0);
  // Causal attention: two products over half of the square of each row, in every head and layer.
  const double attention = 4 * tokens * 64 / 2 * 128 * 3;
  EXPECT_DOUBLE_EQ(work.attention_forward_flops, attention);
  EXPECT_DOUBLE_EQ(work.attention_backward_flops, 2.5 * attention);
}

TEST(StepWork, TensorRanksShareProductsAndAFullRecomputeRepeatsThem) {
  const ModelConfig model = small_model();
  MeshShape mesh;
  mesh.tensor = 2;
  RuntimeOptions options = options_of(model, 2);
  const StepWork half = step_work(model, mesh, options, 1, 0);
  const double tokens = 2 * 64;
  EXPECT_DOUBLE_EQ(half.product_flops(false), 6 * matrix_elements(model) * tokens / 2);

  options = options_of(model, 1);
  options.recompute = Recompute::kFull;
  const StepWork again = step_work(model, MeshShape{}, options, 1, 0);
  // All products of the blocks but the last one of each MLP, once more.
  const double repeated = 3 * (128.0 * 256 + 128 * 128 + 128 * 640);
  EXPECT_DOUBLE_EQ(again.product_flops(false), (6 * matrix_elements(model) + 2 * repeated) * tokens);
}

TEST(StepWork, PassesCountEachTensorOnce) {
  const ModelConfig model = small_model();
  const StepWork work = step_work(model, MeshShape{}, options_of(model, 1), 2, 0);
  const auto bytes_of = [&](const std::string& op) {
    for (const StepPass& pass : work.passes) {
      if (pass.op == op) return pass.bytes;
    }
    return -1.0;
  };
  const double t = 2 * 2 * 64 * 2;  // bytes of one column over all micro-batches
  // Gate and up are read, their product is written; back: dy, gate, up, and two gradients.
  EXPECT_DOUBLE_EQ(bytes_of("swiglu_forward"), 3 * 3 * 320 * t);
  EXPECT_DOUBLE_EQ(bytes_of("swiglu_backward"), 3 * 5 * 320 * t);
  // Seven norms: x, delta, sum and out; the first has no delta and no sum.
  EXPECT_DOUBLE_EQ(bytes_of("rmsnorm_forward"), (7 * 4 - 2) * 128 * t);
  EXPECT_DOUBLE_EQ(bytes_of("rope_forward"), 3 * 2 * (128 + 64) * t);
  EXPECT_DOUBLE_EQ(bytes_of("cross_entropy"), 2 * 1000 * t);
  // Weight, both moments and gradient read, the first three written, the gradient read for the norm.
  const double parameters =
      matrix_elements(model) + (model.tie_word_embeddings ? 0 : 128 * 1000) + 7 * 128;
  EXPECT_DOUBLE_EQ(work.optimizer_bytes, parameters * 2 * 8);
}

}  // namespace
}  // namespace tessera
