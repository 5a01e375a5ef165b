// FP8 products in whole models: losses and gradients lie as far from fp32 as the format rounds,
// under every layout; the same step twice gives the same bits; odd sizes and masked targets do no
// harm (B42 to B45). All of it with one scale per tensor and with scales of blocks.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "engine/train/optimizer.h"
#include "models/weights.h"
#include "tests/engine/train/model_harness.h"
#include "tests/support/expect_error.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 61;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 3;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 4;
  config.head_dim = 16;
  config.rms_norm_eps = 1e-5;
  config.max_position_embeddings = 64;
  return config;
}

QuantRecipe recipe_of(QuantScaling scaling) {
  QuantRecipe recipe;
  recipe.scaling = scaling;
  return recipe;
}
QuantRecipe current() { return recipe_of(QuantScaling::kCurrent); }

// `tokens` tokens in documents of at most 19, drawn from a small vocabulary.
HostBatch batch_of(std::int64_t tokens, std::uint64_t seed) {
  std::vector<std::vector<std::int32_t>> documents;
  const PhiloxKey key = derive_key(seed, RandomPurpose::kSynthetic, 5);
  for (std::int64_t at = 0; at < tokens;) {
    std::vector<std::int32_t> ids;
    for (; at < tokens && ids.size() < 19; ++at) {
      ids.push_back(
          static_cast<std::int32_t>(philox_bits(key, static_cast<std::uint64_t>(at)) % 61));
    }
    documents.push_back(ids);
  }
  return HostBatch::from_documents(documents);
}

// |a - b| / |b| over all parameters together.
double distance(const GlobalTensors& a, const GlobalTensors& b) {
  double difference = 0;
  double size = 0;
  for (const auto& [name, values] : b) {
    const auto& other = a.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      difference += (other[i] - values[i]) * (other[i] - values[i]);
      size += values[i] * values[i];
    }
  }
  return std::sqrt(difference / size);
}
// a . b / b . b over all parameters together.
double projection(const GlobalTensors& a, const GlobalTensors& b) {
  double dot = 0;
  double size = 0;
  for (const auto& [name, values] : b) {
    const auto& other = a.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      dot += other[i] * values[i];
      size += values[i] * values[i];
    }
  }
  return dot / size;
}
double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double dot = 0;
  for (std::size_t i = 0; i < a.size(); ++i) dot += a[i] * b[i];
  return dot / (norm_of(a) * norm_of(b));
}

struct Fp8Case {
  DeviceKind device;
  QuantScaling scaling;
};
std::string case_name(const ::testing::TestParamInfo<Fp8Case>& info) {
  return std::string(info.param.device == DeviceKind::kCpu ? "cpu" : "cuda") +
         (info.param.scaling == QuantScaling::kBlockwise ? "_blockwise" : "");
}

class Fp8Model : public ::testing::TestWithParam<Fp8Case> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0)
      GTEST_SKIP() << "no CUDA device";
    weights_ = random_weights(small_config(), 7, 0.1);
  }
  static QuantRecipe recipe() { return recipe_of(GetParam().scaling); }
  static ModelSetup small_setup(DType compute = DType::kF32) {
    ModelSetup setup;
    setup.config = small_config();
    setup.compute = compute;
    setup.recipe = recipe();
    return setup;
  }
  StepResult run(ModelSetup setup, const std::vector<HostBatch>& batches,
                 double learning_rate = 0) {
    setup.device.kind = GetParam().device;
    return train_step(
        setup, batches, [&](ModelRuntime& runtime) { set_weights(runtime, weights_); },
        learning_rate);
  }
  GlobalTensors weights_;
};

// What rounding alone does. A number of e4m3 is off by 2.6% in the mean square (uniform within 2^-4
// of the power of two below it), one of e5m2 by 5.2%. A sum of products of independent errors is
// off by both operands' together, relative to its own spread: 3.7% in the forward, 5.8% in the
// backward. Behind one another lie at most four products per layer, and one more for the weight's
// own gradient.
const double kProducts = 4.0 * 3;
const double kForwardNoise = 0.037 * std::sqrt(kProducts);
const double kGradientNoise = std::hypot(0.058 * std::sqrt(kProducts + 1), kForwardNoise);
// The logits of these models spread by about 0.8, so a token's loss is off by that share of it;
// three sigma.
double loss_noise(double targets) { return 3 * 0.8 * kForwardNoise * std::sqrt(targets); }

TEST_P(Fp8Model, StaysWithinTheFormatsNoiseOfTheUnquantizedModel) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    ModelSetup setup = small_setup(compute);
    const std::vector<HostBatch> batches{batch_of(48, 1), batch_of(48, 2)};
    const StepResult fp8 = run(setup, batches);
    setup.recipe = {};
    const StepResult plain = run(setup, batches);
    EXPECT_NE(fp8.loss_sum, plain.loss_sum) << "nothing was quantised";
    EXPECT_NEAR(fp8.loss_sum, plain.loss_sum, loss_noise(plain.target_tokens));
    EXPECT_LT(distance(fp8.gradients, plain.gradients), kGradientNoise);
    // Roundings cancel: along the true gradient the length is right.
    EXPECT_NEAR(projection(fp8.gradients, plain.gradients), 1, 0.05);
    // A parameter's own gradient may be small beside the noise of its terms (q and k, behind the
    // softmax).
    for (const auto& [name, values] : plain.gradients) {
      EXPECT_GT(cosine(fp8.gradients.at(name), values), 0.95) << name;
    }
  }
}

TEST_P(Fp8Model, GradientsInE4m3AreNearerOnTheirOwnScale) {
  ModelSetup setup = small_setup();
  const std::vector<HostBatch> batches{batch_of(48, 1)};
  const StepResult e5m2 = run(setup, batches);
  setup.recipe.gradient = DType::kF8E4M3;
  const StepResult e4m3 = run(setup, batches);
  setup.recipe = {};
  const StepResult plain = run(setup, batches);
  EXPECT_EQ(e4m3.loss_sum, e5m2.loss_sum);
  EXPECT_LT(distance(e4m3.gradients, plain.gradients), distance(e5m2.gradients, plain.gradients));
}

TEST_P(Fp8Model, EveryLayoutStaysWithinNoiseOfOneRank) {
  ModelSetup setup = small_setup();
  const std::vector<HostBatch> batches{batch_of(48, 1), batch_of(41, 2), batch_of(48, 3),
                                       batch_of(7, 4)};
  const StepResult base = run(setup, batches);
  setup.recipe = {};
  const StepResult plain = run(setup, batches);
  setup.recipe = recipe();
  const double noise = distance(base.gradients, plain.gradients);
  for (const auto& [dp, tp, sp, zero, recompute] :
       std::vector<std::tuple<int, int, bool, int, Recompute>>{
           {1, 1, false, 0, Recompute::kSelective},
           {1, 1, false, 0, Recompute::kFull},
           {1, 2, false, 0, Recompute::kNone},
           {1, 2, true, 0, Recompute::kNone},
           {1, 2, true, 0, Recompute::kSelective},
           {1, 4, true, 0, Recompute::kFull},
           {2, 1, false, 0, Recompute::kNone},
           {2, 1, false, 1, Recompute::kSelective},
           {2, 2, true, 1, Recompute::kFull},
           {2, 1, false, 2, Recompute::kNone},
           {3, 1, false, 3, Recompute::kFull},
           {2, 2, true, 3, Recompute::kSelective}}) {
    setup.mesh.data = dp;
    setup.mesh.tensor = tp;
    setup.sequence_parallel = sp;
    setup.zero = zero;
    setup.recompute = recompute;
    const StepResult got = run(setup, batches);
    const std::string layout = fmt::format("dp {} tp {} sp {} zero {} recompute {}", dp, tp, sp,
                                           zero, static_cast<int>(recompute));
    EXPECT_TRUE(std::isfinite(got.loss_sum)) << layout;
    EXPECT_EQ(got.target_tokens, base.target_tokens) << layout;
    // As far from the exact gradient as one rank is: pieces of a tensor have scales of their own.
    EXPECT_NEAR(got.loss_sum, plain.loss_sum, loss_noise(plain.target_tokens)) << layout;
    EXPECT_LT(distance(got.gradients, plain.gradients), 1.25 * noise) << layout;
    if (tp == 1 && dp == 1) {
      // Recomputing repeats the same numbers with the same scales.
      EXPECT_EQ(got.loss_sum, base.loss_sum) << layout;
      EXPECT_EQ(distance(got.gradients, base.gradients), 0) << layout;
    }
  }
}

// Under ZeRO 3 codes are cast from shards, whose scales are those of the whole: the same codes, gathered at half
// the bytes.
TEST_P(Fp8Model, GatheredCodesAreThoseOfWholeWeights) {
  ModelSetup setup = small_setup(DType::kBF16);
  const std::vector<HostBatch> batches{batch_of(48, 1), batch_of(41, 2), batch_of(48, 3)};
  for (const auto& [dp, tp, sp, recompute] : std::vector<std::tuple<int, int, bool, Recompute>>{
           {2, 1, false, Recompute::kNone}, {3, 2, true, Recompute::kFull}, {2, 2, false, Recompute::kSelective}}) {
    setup.mesh.data = dp;
    setup.mesh.tensor = tp;
    setup.sequence_parallel = sp;
    setup.recompute = recompute;
    setup.steps = 3;
    setup.inline_streams = dp == 3;
    setup.zero = 2;
    const StepResult whole = run(setup, batches, 1e-2);
    setup.zero = 3;
    setup.device.kind = GetParam().device;
    std::atomic<int> gathered = 0;
    const StepResult codes = train_step(
        setup, batches,
        [&](ModelRuntime& runtime) {
          set_weights(runtime, weights_);
          for (int b = 0; b < runtime.params().num_buckets(); ++b) gathered += runtime.params().gathers_codes(b);
        },
        1e-2);
    const std::string layout = fmt::format("dp {} tp {} sp {}", dp, tp, sp);
    // Every block of every rank.
    const int blocks = static_cast<int>(setup.config.num_hidden_layers) * dp * tp;
    EXPECT_EQ(gathered, GetParam().scaling == QuantScaling::kCurrent ? blocks : 0) << layout;
    EXPECT_EQ(codes.loss_sum, whole.loss_sum) << layout;
    EXPECT_EQ(distance(codes.gradients, whole.gradients), 0) << layout;
    EXPECT_EQ(distance(codes.weights, whole.weights), 0) << layout;
  }
}

// Stages keep the scales of every micro-batch in flight, and measure the gradients that they receive: the numbers of
// one rank.
TEST_P(Fp8Model, PipelinesComputeWhatOneRankDoes) {
  ModelSetup setup = small_setup(DType::kBF16);
  setup.config.num_hidden_layers = 4;
  weights_ = random_weights(setup.config, 7, 0.1);
  setup.steps = 2;
  const std::vector<HostBatch> batches{batch_of(48, 1), batch_of(41, 2), batch_of(48, 3), batch_of(7, 4)};
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    setup.recompute = recompute;
    setup.mesh = MeshShape{};
    setup.chunks = 1;
    const StepResult base = run(setup, batches, 1e-2);
    for (const auto& [stages, chunks, kind] : std::vector<std::tuple<int, int, PipelineKind>>{
             {2, 1, PipelineKind::k1F1B}, {4, 1, PipelineKind::k1F1B}, {2, 1, PipelineKind::kGPipe},
             {2, 2, PipelineKind::kInterleaved}}) {
      setup.mesh.pipeline = stages;
      setup.chunks = chunks;
      setup.schedule = kind;
      const StepResult got = run(setup, batches, 1e-2);
      const std::string layout = fmt::format("pp {} chunks {} recompute {}", stages, chunks, static_cast<int>(recompute));
      EXPECT_EQ(got.loss_sum, base.loss_sum) << layout;
      EXPECT_EQ(distance(got.gradients, base.gradients), 0) << layout;
      EXPECT_EQ(distance(got.weights, base.weights), 0) << layout;
    }
  }
}

TEST_P(Fp8Model, TheSameStepTwiceGivesTheSameBits) {
  ModelSetup setup = small_setup(DType::kBF16);
  setup.mesh.tensor = 2;
  setup.sequence_parallel = true;
  const std::vector<HostBatch> batches{batch_of(48, 1), batch_of(48, 2)};
  const StepResult a = run(setup, batches, 1e-3);
  const StepResult b = run(setup, batches, 1e-3);
  EXPECT_EQ(a.loss_sum, b.loss_sum);
  EXPECT_EQ(distance(a.weights, b.weights), 0);
  EXPECT_EQ(distance(a.gradients, b.gradients), 0);
}

// B45: micro-batches of any number of tokens; hidden sizes that FP8 products cannot take.
TEST_P(Fp8Model, OddSizesArePaddedOrLeftInTheComputeFormat) {
  for (const std::int64_t tokens : {1, 13, 37}) {
    ModelSetup setup = small_setup(DType::kBF16);
    const StepResult fp8 = run(setup, {batch_of(tokens + 1, 9)});
    setup.recipe = {};
    const StepResult plain = run(setup, {batch_of(tokens + 1, 9)});
    EXPECT_NEAR(fp8.loss_sum, plain.loss_sum, loss_noise(plain.target_tokens))
        << tokens << " tokens";
    EXPECT_LT(distance(fp8.gradients, plain.gradients), kGradientNoise) << tokens << " tokens";
  }
  ModelSetup odd = small_setup();
  odd.config.hidden_size = 40;
  weights_ = random_weights(odd.config, 7, 0.1);
  const Transformer model(odd.config, 1, false, recipe());
  EXPECT_EQ(model.quant_registry().share(), 0);
  EXPECT_NE(model.quant_registry().note().find(
                "12 linear layers have a size that is not a multiple of 16"),
            std::string::npos)
      << model.quant_registry().note();
  const StepResult quantized = run(odd, {batch_of(48, 1)});
  odd.recipe = {};
  EXPECT_EQ(run(odd, {batch_of(48, 1)}).loss_sum, quantized.loss_sum);
}

// B44: a zero matrix, gradients that are zero, and outliers.
TEST_P(Fp8Model, ZerosAndOutliersStayFinite) {
  ModelSetup setup = small_setup(DType::kBF16);
  for (double& value : weights_.at("model.layers.1.mlp.down_proj.weight")) value = 0;
  weights_.at("model.layers.0.self_attn.o_proj.weight")[5] = 1e4;
  weights_.at("model.layers.2.mlp.up_proj.weight")[7] = 1e-30;
  HostBatch batch = batch_of(48, 1);
  const StepResult result = run(setup, {batch});
  EXPECT_TRUE(std::isfinite(result.loss_sum));
  for (const auto& [name, values] : result.gradients)
    EXPECT_TRUE(std::isfinite(norm_of(values))) << name;
  std::fill(batch.targets.begin(), batch.targets.end(), -100);
  const StepResult masked = run(setup, {batch, batch_of(48, 2)});
  const StepResult alone = run(setup, {batch_of(48, 2)});
  EXPECT_EQ(masked.loss_sum, alone.loss_sum);
  EXPECT_EQ(distance(masked.gradients, alone.gradients), 0);
  // What is not finite is not cut to the format's range: the norm shows it, and the step is
  // skipped.
  weights_.at("model.layers.1.self_attn.q_proj.weight")[3] = INFINITY;
  const StepResult broken = run(setup, {batch_of(48, 2)}, 1e-3);
  EXPECT_FALSE(std::isfinite(broken.grad_norm));
  const std::vector<double>& kept = broken.weights.at("model.norm.weight");
  const std::vector<double>& given = weights_.at("model.norm.weight");
  for (std::size_t i = 0; i < given.size(); ++i) {
    EXPECT_EQ(kept[i], static_cast<double>(static_cast<float>(given[i])));
  }
}

// Sizes beyond a block of scales that are no multiples of one: several blocks and a part in every
// dimension of every product.
TEST_P(Fp8Model, SizesBeyondOneBlockOfScales) {
  ModelSetup setup = small_setup(DType::kBF16);
  setup.config.hidden_size = 144;
  setup.config.num_attention_heads = 6;
  setup.config.num_key_value_heads = 2;
  setup.config.head_dim = 48;
  setup.config.intermediate_size = 272;
  weights_ = random_weights(setup.config, 11, 0.05);
  const std::vector<HostBatch> batches{batch_of(304, 1), batch_of(131, 2)};
  const StepResult one = run(setup, batches);
  for (const auto& [tp, sp, zero, recompute] :
       std::vector<std::tuple<int, bool, int, Recompute>>{{1, false, 0, Recompute::kSelective},
                                                          {1, false, 0, Recompute::kFull},
                                                          {2, false, 0, Recompute::kNone},
                                                          {2, true, 0, Recompute::kSelective},
                                                          {1, false, 3, Recompute::kFull}}) {
    ModelSetup other = setup;
    other.mesh.tensor = tp;
    other.mesh.data = zero > 0 ? 2 : 1;
    other.sequence_parallel = sp;
    other.zero = zero;
    other.recompute = recompute;
    const StepResult got = run(other, batches);
    const std::string layout = fmt::format("tp {} sp {} zero {}", tp, sp, zero);
    EXPECT_NEAR(got.loss_sum, one.loss_sum, loss_noise(one.target_tokens)) << layout;
    EXPECT_LT(distance(got.gradients, one.gradients), 1.5 * kGradientNoise) << layout;
    if (tp == 1 && zero == 0) {
      EXPECT_EQ(got.loss_sum, one.loss_sum) << layout;
      EXPECT_EQ(distance(got.gradients, one.gradients), 0) << layout;
    }
  }
  setup.recipe = {};
  const StepResult plain = run(setup, batches);
  EXPECT_NE(one.loss_sum, plain.loss_sum) << "nothing was quantised";
  EXPECT_NEAR(one.loss_sum, plain.loss_sum, loss_noise(plain.target_tokens));
  EXPECT_LT(distance(one.gradients, plain.gradients), kGradientNoise);
  EXPECT_NEAR(projection(one.gradients, plain.gradients), 1, 0.05);
}

INSTANTIATE_TEST_SUITE_P(Devices, Fp8Model,
                         ::testing::Values(Fp8Case{DeviceKind::kCpu, QuantScaling::kCurrent},
                                           Fp8Case{DeviceKind::kCpu, QuantScaling::kBlockwise},
                                           Fp8Case{DeviceKind::kCuda, QuantScaling::kCurrent},
                                           Fp8Case{DeviceKind::kCuda, QuantScaling::kBlockwise}),
                         case_name);

// What scales of blocks are for: a matrix whose rows reach over many powers of two. Rounded with
// one scale its small rows vanish, in the copy for each product.
TEST(BlockScales, FewerNumbersVanishThanWithOneScale) {
  OpFixture f;
  const std::int64_t rows = 256, cols = 384;
  Values in = normal_values(rows * cols, 3);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      // Rows fall by 2^20; in the columns' direction, blocks of 128 rows differ by half of it.
      in[static_cast<std::size_t>(i * cols + j)] *=
          std::exp2(-20.0 * static_cast<double>(i) / rows);
    }
  }
  const Tensor plain = f.input(in, DType::kBF16, Shape{rows, cols});
  for (const DType format : {DType::kF8E4M3, DType::kF8E5M2}) {
    Quantize one;
    one.in = plain;
    one.amax = f.input({0}, DType::kF32, Shape{1});
    one.row = f.output(format, Shape{rows, cols});
    one.column = f.output(format, Shape{cols, rows});
    one.scale = f.output(DType::kF32, Shape{1});
    f.run(amax, Amax{plain, one.amax});
    f.run(quantize, one);
    QuantizeBlocks many;
    many.in = plain;
    many.row = f.output(format, Shape{rows, cols});
    many.row_scale = f.output(DType::kF32, scale_shape(many.mode, rows, cols));
    many.column = f.output(format, Shape{cols, rows});
    many.column_scale = f.output(DType::kF32, scale_shape(many.mode, cols, rows));
    f.run(quantize_blocks, many);
    const auto zeros = [&](const Tensor& t) {
      const Values values = f.values(t);
      return std::count(values.begin(), values.end(), 0.0);
    };
    EXPECT_LT(zeros(many.row), rows * cols / 200);
    // e4m3 reaches over 2^17, e5m2 over 2^32.
    if (format == DType::kF8E4M3) {
      EXPECT_GT(zeros(one.row), rows * cols / 10);
      EXPECT_LT(zeros(many.row), zeros(one.row) / 20);
      EXPECT_LT(zeros(many.column), zeros(one.column) / 4);
    } else {
      EXPECT_LE(zeros(many.row), zeros(one.row));
      EXPECT_LE(zeros(many.column), zeros(one.column));
    }
  }
}

TEST(QuantRegistry, KeepsWhatTheRecipeLists) {
  QuantRecipe recipe = current();
  const auto share = [&](std::vector<std::string> keep) {
    recipe.keep_bf16 = std::move(keep);
    return Transformer(small_config(), 1, false, recipe).quant_registry().share();
  };
  // Per layer 4 x 64 x 64 of attention and 3 x 64 x 96 of the MLP; the head 61 x 64.
  const double block = 4 * 64 * 64 + 3 * 64 * 96;
  const double all = 3 * block + 61 * 64;
  EXPECT_DOUBLE_EQ(share({"lm_head"}), 3 * block / all);
  EXPECT_DOUBLE_EQ(share({"lm_head", "layers.0"}), 2 * block / all);
  EXPECT_DOUBLE_EQ(share({"lm_head", "down_proj"}), (3 * block - 3 * 64 * 96) / all);
  // q, k and v are one product.
  EXPECT_DOUBLE_EQ(share({"k_proj"}), (3 * block - 3 * 3 * 64 * 64) / all);
  expect_error(ErrorKind::kUser, {"precision.keep_bf16 lists \"layers.3\", which names no layer"},
               [&] {
                 share({"lm_head", "layers.3"});
               });
  expect_error(ErrorKind::kUser, {"lists \"proj\""}, [&] { share({"proj"}); });
  recipe.scaling = QuantScaling::kNone;
  EXPECT_EQ(share({}), 0);
}

// B42: copies follow the weights: what was cast before an update or a load is not used after it.
class QuantStateOf : public ::testing::TestWithParam<QuantScaling> {};
TEST_P(QuantStateOf, CastsAgainWhenTheWeightsChange) {
  const auto context = make_context(Device{}, {});
  const ProcessMesh mesh(make_self_communicator(), MeshShape{});
  RuntimeOptions options;
  options.geometry = batch_geometry(1, 48, 4, DType::kF32, 1, false);
  options.params.compute = DType::kF32;
  options.recipe = recipe_of(GetParam());
  const HostBatch batch = batch_of(48, 1);
  const auto loss_of = [&](ModelRuntime& runtime) {
    upload(batch, runtime);
    LayerContext layer = runtime.layer_context();
    runtime.compute().set_zero(runtime.totals().data, runtime.totals().bytes());
    runtime.model().evaluate(runtime.batch(), runtime.loss_sum(), runtime.nll(), layer);
    double loss = 0;
    runtime.compute().copy_bytes(&loss, runtime.loss_sum().data, sizeof loss);
    runtime.compute().synchronize();
    return loss;
  };
  const RuntimeMemory memory = measure_runtime(
      context->capabilities(), MeshShape{}, 0, small_config(), options, [&](ModelRuntime& dry) {
        LayerContext layer = dry.layer_context();
        dry.model().evaluate(dry.batch(), dry.loss_sum(), dry.nll(), layer);
      });
  const GlobalTensors before = random_weights(small_config(), 1, 0.1);
  const GlobalTensors after = random_weights(small_config(), 2, 0.1);
  ModelRuntime runtime(*context, mesh, small_config(), options, memory);
  set_weights(runtime, before);
  const double first = loss_of(runtime);
  EXPECT_EQ(loss_of(runtime), first);
  set_weights(runtime, after);
  const double second = loss_of(runtime);
  EXPECT_NE(second, first);
  ModelRuntime fresh(*context, mesh, small_config(), options, memory);
  set_weights(fresh, after);
  EXPECT_EQ(loss_of(fresh), second);
}
INSTANTIATE_TEST_SUITE_P(Scalings, QuantStateOf,
                         ::testing::Values(QuantScaling::kCurrent, QuantScaling::kBlockwise));

}  // namespace
}  // namespace tessera::test
