// bf16 against fp32 on the same weights, measured by PyTorch's own bf16
// (tools/goldens/make_bf16_errors.py made its errors): losses and gradients may lie at most three
// times as far from fp32.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "models/hf/config_io.h"
#include "models/weights.h"
#include "tests/engine/train/golden_harness.h"
#include "tests/support/test_data.h"

namespace tessera::test {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr double kTimesTorch = 3;

Json read_json(const fs::path& path) {
  Json json;
  std::ifstream(path) >> json;
  return json;
}

struct Row {
  fs::path folder;
  HostBatch batch;
};

Row golden_row(const fs::path& folder) {
  const Json golden = read_json(folder / "golden.json");
  for (const Json& row : golden.at("rows")) {
    if (row.at("name") == golden.at("gradient_row")) return {folder, hf_batch(row)};
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[test] {} has no gradient row", folder.string());
}

Row stories_row(const fs::path& data) {
  const Json reference = read_json(data / "golden/stories260K_reference.json");
  return {data / "models/stories260K/hf", stories_batch(stories_case(reference, "single_doc_0"))};
}

class Bf16Error : public ::testing::TestWithParam<DeviceKind> {};

TEST_P(Bf16Error, LiesWithinThreeTimesTorchs) {
  if (GetParam() == DeviceKind::kCuda && cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const fs::path root = fs::path(TESSERA_SOURCE_DIR) / "tests/models/golden";
  const Json yardstick = read_json(root / "bf16_errors.json").at("models");
  double losses = 0;
  double torch_losses = 0;
  for (const auto& [name, errors] : yardstick.items()) {
    Row row;
    if (name == "stories260K") {
      const auto data = data_path("models/stories260K/hf");
      if (!data) continue;
      row = stories_row(data->parent_path().parent_path().parent_path());
    } else {
      row = golden_row(root / "hf" / name);
    }
    ModelSetup setup;
    setup.config = load_hf_config(row.folder).model;
    const SafetensorsFolder weights(row.folder);
    const HfNameMap names = match_hf_tensors(setup.config, weights);
    const auto run = [&](DType compute, DeviceKind device) {
      setup.compute = compute;
      setup.device.kind = device;
      return train_step(setup, {row.batch},
                        [&](ModelRuntime& runtime) { load_weights(runtime, weights, names); });
    };
    const StepResult exact = run(DType::kF32, DeviceKind::kCpu);
    const StepResult got = run(DType::kBF16, GetParam());
    double difference = 0;
    double size = 0;
    for (const auto& [parameter, values] : exact.gradients) {
      const auto& low = got.gradients.at(parameter);
      for (std::size_t i = 0; i < values.size(); ++i) {
        difference += (low[i] - values[i]) * (low[i] - values[i]);
        size += values[i] * values[i];
      }
    }
    const double error = std::sqrt(difference / size);
    const double loss = (got.loss_sum - exact.loss_sum) / exact.loss_sum;
    const double torch = errors.at("gradient");
    std::printf("  %-20s gradient error %.2e, PyTorch's %.2e; loss error %+.2e, PyTorch's %.2e\n",
                name.c_str(), error, torch, loss, errors.at("loss").get<double>());
    EXPECT_LE(error, kTimesTorch * torch) << name;
    losses += loss * loss;
    torch_losses += std::pow(errors.at("loss").get<double>(), 2);
  }
  // One loss may be exact by luck; all together they are not.
  EXPECT_LE(std::sqrt(losses), kTimesTorch * std::sqrt(torch_losses));
}

INSTANTIATE_TEST_SUITE_P(Devices, Bf16Error, ::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                         [](const auto& info) {
                           return info.param == DeviceKind::kCpu ? std::string("cpu") : "cuda";
                         });

}  // namespace
}  // namespace tessera::test
