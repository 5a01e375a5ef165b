// Tiny random models of every family and rope kind against transformers: logits, losses and the
// gradient of every parameter (tools/goldens/make_hf_goldens.py made the values).
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "engine/device/stream.h"
#include "kernels/ops.h"
#include "models/hf/config_io.h"
#include "models/weights.h"
#include "tests/engine/train/golden_harness.h"

namespace tessera::test {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Relative to the norm of the reference: fp32 here against float64 there, which keeps about 1e-7.
constexpr double kTolerance = 1e-4;

fs::path golden_root() { return fs::path(TESSERA_SOURCE_DIR) / "tests/models/golden/hf"; }

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(golden_root()))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

struct Golden {
  std::string name;
  DeviceKind device = DeviceKind::kCpu;
};
std::ostream& operator<<(std::ostream& out, const Golden& golden) { return out << golden.name; }

std::vector<Golden> goldens_on(DeviceKind device) {
  std::vector<Golden> goldens;
  for (const std::string& name : golden_names()) goldens.push_back({name, device});
  return goldens;
}

class HfGolden : public ::testing::TestWithParam<Golden> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
    folder_ = golden_root() / GetParam().name;
    setup_.device.kind = GetParam().device;
    std::ifstream(folder_ / "golden.json") >> golden_;
    setup_.config = load_hf_config(folder_).model;
    weights_ = std::make_unique<SafetensorsFolder>(folder_);
    names_ = match_hf_tensors(setup_.config, *weights_);
    values_ = std::make_unique<SafetensorsFile>(folder_ / "golden.safetensors");
  }

  std::vector<double> reference(const std::string& name) const {
    const SafetensorsTensor& tensor = values_->get(name);
    std::vector<float> raw(static_cast<std::size_t>(tensor.numel()));
    values_->read_elements(tensor, 0, tensor.numel(), raw.data());
    return {raw.begin(), raw.end()};
  }
  void expect_near(const std::vector<double>& got, const std::vector<double>& wanted,
                   const std::string& what) const {
    ASSERT_EQ(got.size(), wanted.size()) << what;
    double error = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
      error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    EXPECT_LE(std::sqrt(error), kTolerance * norm_of(wanted)) << what;
  }

  fs::path folder_;
  Json golden_;
  ModelSetup setup_;
  std::unique_ptr<SafetensorsFolder> weights_;
  HfNameMap names_;
  std::unique_ptr<SafetensorsFile> values_;
};

TEST_P(HfGolden, LossesAndGradientsUnderTensorParallelism) {
  for (const int tensor : {1, 2}) {
    if (setup_.config.num_attention_heads % tensor != 0) continue;
    setup_.mesh.tensor = tensor;
    setup_.sequence_parallel = tensor > 1;
    for (const Json& row : golden_.at("rows")) {
      const StepResult got = train_step(setup_, {hf_batch(row)}, [&](ModelRuntime& runtime) {
        load_weights(runtime, *weights_, names_);
      });
      const std::string where = fmt::format("{} tp {}", row.at("name").get<std::string>(), tensor);
      const double loss = row.at("loss");
      EXPECT_NEAR(got.loss_sum / got.target_tokens, loss, kTolerance * loss) << where;
      if (row.at("name") != golden_.at("gradient_row")) continue;
      for (const auto& [name, gradient] : got.gradients) {
        std::vector<double> mean = gradient;
        for (double& value : mean) value /= got.target_tokens;
        expect_near(mean, reference("grad." + name), where + " " + name);
      }
      EXPECT_NEAR(got.grad_norm, golden_.at("gradient_norm").get<double>(),
                  kTolerance * golden_.at("gradient_norm").get<double>())
          << where;
    }
  }
}

TEST_P(HfGolden, LogitsOfEveryDocument) {
  const auto context = make_context(setup_.device);
  const ProcessMesh mesh(make_self_communicator(), MeshShape{});
  for (const Json& row : golden_.at("rows")) {
    const HostBatch batch = hf_batch(row);
    const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
    RuntimeOptions options;
    options.geometry = batch_geometry(1, tokens, 1, DType::kF32, 1, false);
    options.params.compute = DType::kF32;
    options.params.trains = false;
    options.overlap = false;
    const std::int64_t vocab = setup_.config.vocab_size;
    const QkvLayout layout = local_qkv_layout(setup_.config, 1);
    Arena arena(*context, std::size_t{1} << 24);
    std::vector<LayerCache> caches;
    for (int layer = 0; layer < setup_.config.num_hidden_layers; ++layer) {
      const auto take = [&] {
        return arena.allocate("cache", DType::kF32, Shape{tokens, layout.kv_cols()},
                              MemoryClass::kActivations);
      };
      LayerCache cache;
      cache.k = take();
      cache.v = take();
      caches.push_back(cache);
    }
    const Tensor keys = arena.allocate("keys", DType::kI32, Shape{2}, MemoryClass::kInput);
    std::vector<double> got;
    for (std::size_t d = 0; d + 1 < batch.documents.size(); ++d) {
      const std::int64_t begin = batch.documents[d];
      const std::int64_t count = batch.documents[d + 1] - begin;
      const Tensor logits =
          arena.allocate("logits", DType::kF32, Shape{count, vocab}, MemoryClass::kActivations);
      // Dynamic rope follows the length of the text, so each document has a runtime of its own
      // length.
      options.geometry.max_length = setup_.config.rope.kind == RopeKind::kDynamic ? tokens : count;
      const RuntimeMemory memory = measure_runtime(
          context->capabilities(), MeshShape{}, 0, setup_.config, options, [&](ModelRuntime& dry) {
            LayerContext layer = dry.layer_context();
            const Device meta = dry.context().device();
            const Tensor row(nullptr, DType::kF32, Shape{tokens, layout.kv_cols()}, meta);
            const std::vector<LayerCache> dry_caches(caches.size(), LayerCache{row, row});
            dry.model().decode(dry.batch(), dry_caches, 0,
                               Tensor(nullptr, DType::kI32, Shape{2}, meta), 0,
                               Tensor(nullptr, DType::kF32, Shape{tokens, vocab}, meta), layer);
          });
      ModelRuntime runtime(*context, mesh, setup_.config, options, memory);
      load_weights(runtime, *weights_, names_);
      DeviceBatch device = runtime.batch();
      device.tokens = device.tokens.flat_slice(0, count);
      device.positions = device.positions.flat_slice(0, count);
      const std::int32_t bounds[2] = {0, static_cast<std::int32_t>(count)};
      Stream& stream = runtime.compute();
      stream.copy_bytes(device.tokens.data, &batch.tokens[static_cast<std::size_t>(begin)],
                        device.tokens.bytes());
      stream.copy_bytes(device.positions.data, &batch.positions[static_cast<std::size_t>(begin)],
                        device.positions.bytes());
      stream.copy_bytes(device.documents.data, bounds, sizeof bounds);
      stream.copy_bytes(keys.data, bounds, sizeof bounds);
      stream.synchronize();
      LayerContext layer = runtime.layer_context();
      runtime.model().decode(device, caches, 0, keys, 0, logits, layer);
      std::vector<float> values(static_cast<std::size_t>(logits.numel()));
      stream.copy_bytes(values.data(), logits.data, logits.bytes());
      stream.synchronize();
      got.insert(got.end(), values.begin(), values.end());
    }
    expect_near(got, reference("logits." + row.at("name").get<std::string>()),
                row.at("name").get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Families, HfGolden, ::testing::ValuesIn(goldens_on(DeviceKind::kCpu)),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(OnGpu, HfGolden, ::testing::ValuesIn(goldens_on(DeviceKind::kCuda)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::test
