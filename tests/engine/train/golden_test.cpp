// The float64 goldens of stories260K (real pre-trained weights) under every layout, of CPU ranks
// and of ranks that share a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "models/hf/config_io.h"
#include "models/weights.h"
#include "tests/engine/train/golden_harness.h"
#include "tests/support/test_data.h"

namespace tessera::test {
namespace {

using Json = nlohmann::json;

struct Layout {
  const char* name;
  MeshShape mesh;
  bool sequence_parallel = false;
  int zero = 0;
  Recompute recompute = Recompute::kNone;
  bool inline_streams = true;
  DeviceKind device = DeviceKind::kCpu;
  PipelineKind schedule = PipelineKind::k1F1B;
  int chunks = 1;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << layout.name; }

MeshShape mesh_of(int dp, int tp, int pp = 1, int cp = 1) {
  MeshShape shape;
  shape.context = cp;
  shape.pipeline = pp;
  shape.data = dp;
  shape.tensor = tp;
  return shape;
}

class StoriesGolden : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    TESSERA_REQUIRE_DATA(reference_path, "golden/stories260K_reference.json");
    TESSERA_REQUIRE_DATA(model_path, "models/stories260K/hf");
    std::ifstream(reference_path) >> reference_;
    setup_.config = load_hf_config(model_path).model;
    folder_ = std::make_unique<SafetensorsFolder>(model_path);
    names_ = match_hf_tensors(setup_.config, *folder_);
    const Layout& layout = GetParam();
    if (layout.device == DeviceKind::kCuda && cuda_device_count() == 0)
      GTEST_SKIP() << "no CUDA device";
    setup_.device.kind = layout.device;
    setup_.mesh = layout.mesh;
    setup_.sequence_parallel = layout.sequence_parallel;
    setup_.zero = layout.zero;
    setup_.recompute = layout.recompute;
    setup_.inline_streams = layout.inline_streams;
    setup_.schedule = layout.schedule;
    setup_.chunks = layout.chunks;
  }

  StepResult run(const std::vector<HostBatch>& batches, double learning_rate = 0,
                 double max_grad_norm = 0) {
    return train_step(
        setup_, batches, [&](ModelRuntime& runtime) { load_weights(runtime, *folder_, names_); },
        learning_rate, max_grad_norm);
  }
  std::vector<HostBatch> four_documents() const {
    std::vector<HostBatch> batches;
    for (int i = 0; i < 4; ++i) {
      batches.push_back(stories_batch(stories_case(reference_, "single_doc_" + std::to_string(i))));
    }
    return batches;
  }

  // Relative: fp32 against float64. A GPU has sums of its own order and approximate functions.
  double tolerance() const { return GetParam().device == DeviceKind::kCuda ? 1e-4 : 1e-5; }
  void expect_close(double got, double wanted, const std::string& what) const {
    EXPECT_NEAR(got, wanted, tolerance() * std::fabs(wanted)) << what;
  }

  Json reference_;
  ModelSetup setup_;
  std::unique_ptr<SafetensorsFolder> folder_;
  HfNameMap names_;
};

TEST_P(StoriesGolden, AccumulatedDocumentsAreNormalisedByTokens) {
  const Json wanted = stories_case(reference_, "accumulate_4_docs_token_normalised");
  const StepResult got = run(four_documents());
  EXPECT_EQ(got.target_tokens, wanted.at("tokens").get<double>());
  expect_close(got.loss_sum / got.target_tokens, wanted.at("loss_mean"), "loss");
  expect_close(got.grad_norm, wanted.at("grad_norm"), "gradient norm");
  for (const auto& [name, norm] : wanted.at("grad_norm_per_tensor").items()) {
    ASSERT_TRUE(got.gradients.contains(name)) << name;
    expect_close(norm_of(got.gradients.at(name)) / got.target_tokens, norm, name);
  }
}

TEST_P(StoriesGolden, PackedDocumentsDoNotSeeEachOther) {
  const Json wanted = stories_case(reference_, "packed_3_docs_isolated");
  const StepResult got = run({stories_batch(wanted)});
  expect_close(got.loss_sum / got.target_tokens, wanted.at("loss_mean"), "loss");
  expect_close(got.grad_norm, wanted.at("grad_norm"), "gradient norm");
}

TEST_P(StoriesGolden, MaskedPromptAddsNothing) {
  const Json wanted = stories_case(reference_, "prompt_masked_first_60");
  const StepResult got = run({stories_batch(wanted)});
  expect_close(got.loss_sum / got.target_tokens, wanted.at("loss_mean"), "loss");
  expect_close(got.grad_norm, wanted.at("grad_norm"), "gradient norm");
}

TEST_P(StoriesGolden, AdamWStepClipsAndDecaysMatricesOnly) {
  const Json wanted = stories_case(reference_, "one_adamw_step_on_accumulate_4_docs");
  setup_.weight_decay = wanted.at("weight_decay_2d_only").get<float>();
  const StepResult got = run(four_documents(), wanted.at("lr"), wanted.at("clip_grad_norm"));
  for (const auto& [name, sum] : wanted.at("weight_sum_after").items()) {
    const auto& values = got.weights.at(name);
    double total = 0;
    double magnitude = 0;
    for (const double v : values) {
      total += v;
      magnitude += std::fabs(v);
    }
    // The sum cancels: the error is relative to the sum of magnitudes. A tenth of the tolerance: no
    // decay at all moves it by 9.6e-6, a learning rate that is 0.1% off by 1.1e-6. Adam's first
    // step is about lr * sign(g), which fp32 noise can flip only where the gradient is all but
    // zero.
    EXPECT_NEAR(total, sum.get<double>(), 0.1 * tolerance() * magnitude) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, StoriesGolden,
    ::testing::Values(
        Layout{"one_rank", mesh_of(1, 1)},
        Layout{"one_rank_workers", mesh_of(1, 1), false, 0, Recompute::kNone, false},
        Layout{"selective", mesh_of(1, 1), false, 0, Recompute::kSelective},
        Layout{"full", mesh_of(1, 1), false, 0, Recompute::kFull}, Layout{"tp2", mesh_of(1, 2)},
        Layout{"tp4", mesh_of(1, 4)}, Layout{"tp8", mesh_of(1, 8)},
        Layout{"tp2_sp", mesh_of(1, 2), true},
        Layout{"tp4_sp_workers", mesh_of(1, 4), true, 0, Recompute::kNone, false},
        Layout{"tp8_sp_full", mesh_of(1, 8), true, 0, Recompute::kFull},
        Layout{"dp2", mesh_of(2, 1)}, Layout{"dp2_zero1", mesh_of(2, 1), false, 1},
        Layout{"dp3_zero1", mesh_of(3, 1), false, 1}, Layout{"dp2_zero2", mesh_of(2, 1), false, 2},
        Layout{"dp3_zero2_full_workers", mesh_of(3, 1), false, 2, Recompute::kFull, false},
        Layout{"one_rank_zero3", mesh_of(1, 1), false, 3},
        Layout{"dp3_zero3_workers", mesh_of(3, 1), false, 3, Recompute::kNone, false},
        Layout{"tp2_dp2_zero3_sp_selective", mesh_of(2, 2), true, 3, Recompute::kSelective},
        Layout{"tp4_dp2_zero3_full", mesh_of(2, 4), false, 3, Recompute::kFull},
        Layout{"tp2_dp2_zero1_sp", mesh_of(2, 2), true, 1},
        Layout{"tp4_dp2_zero1_sp_selective", mesh_of(2, 4), true, 1, Recompute::kSelective},
        Layout{"tp2_dp2_zero1_full_workers", mesh_of(2, 2), false, 1, Recompute::kFull, false}),
    [](const auto& info) { return std::string(info.param.name); });

// Blocks cut over ranks; the embedding is tied, so the first and the last hold it (B11, B13).
Layout piped(const char* name, MeshShape mesh, PipelineKind schedule, int chunks = 1,
             bool sequence_parallel = false, int zero = 0, Recompute recompute = Recompute::kNone,
             bool inline_streams = true) {
  return {name,     mesh,  sequence_parallel, zero, recompute, inline_streams, DeviceKind::kCpu,
          schedule, chunks};
}

INSTANTIATE_TEST_SUITE_P(
    Pipelines, StoriesGolden,
    ::testing::Values(
        piped("pp2", mesh_of(1, 1, 2), PipelineKind::k1F1B),
        piped("pp2_gpipe_workers", mesh_of(1, 1, 2), PipelineKind::kGPipe, 1, false, 0,
              Recompute::kNone, false),
        piped("pp5", mesh_of(1, 1, 5), PipelineKind::k1F1B),
        piped("pp5_gpipe_full", mesh_of(1, 1, 5), PipelineKind::kGPipe, 1, false, 0,
              Recompute::kFull),
        piped("pp2_virtual2", mesh_of(1, 1, 2), PipelineKind::kInterleaved, 2),
        piped("pp2_virtual2_selective_workers", mesh_of(1, 1, 2), PipelineKind::kInterleaved, 2,
              false, 0, Recompute::kSelective, false),
        piped("pp5_interleaved", mesh_of(1, 1, 5), PipelineKind::kInterleaved),
        piped("dp2_pp2_zero1", mesh_of(2, 1, 2), PipelineKind::k1F1B, 1, false, 1),
        piped("dp2_pp2_zero2_full_workers", mesh_of(2, 1, 2), PipelineKind::k1F1B, 1, false, 2,
              Recompute::kFull, false),
        piped("dp2_pp2_virtual2_zero3", mesh_of(2, 1, 2), PipelineKind::kInterleaved, 2, false, 3),
        piped("tp2_dp2_pp2_sp_zero1", mesh_of(2, 2, 2), PipelineKind::k1F1B, 1, true, 1),
        piped("tp2_dp2_pp2_sp_zero3_workers", mesh_of(2, 2, 2), PipelineKind::k1F1B, 1, true, 3,
              Recompute::kSelective, false)),
    [](const auto& info) { return std::string(info.param.name); });

// The tokens of each row cut over ranks; no row of these goldens has a length that divides.
INSTANTIATE_TEST_SUITE_P(
    Contexts, StoriesGolden,
    ::testing::Values(Layout{"cp2", mesh_of(1, 1, 1, 2)},
                      Layout{"cp4_workers", mesh_of(1, 1, 1, 4), false, 0, Recompute::kNone, false},
                      Layout{"cp3_zero3_full", mesh_of(1, 1, 1, 3), false, 3, Recompute::kFull},
                      Layout{"cp2_tp2", mesh_of(1, 2, 1, 2)},
                      Layout{"cp2_tp4_sp", mesh_of(1, 4, 1, 2), true},
                      Layout{"cp2_dp2_zero1", mesh_of(2, 1, 1, 2), false, 1},
                      Layout{"cp2_dp2_tp2_sp_zero2_selective", mesh_of(2, 2, 1, 2), true, 2,
                             Recompute::kSelective},
                      piped("cp2_pp2", mesh_of(1, 1, 2, 2), PipelineKind::k1F1B),
                      piped("cp2_tp2_pp2_virtual2_sp_zero3_workers", mesh_of(1, 2, 2, 2),
                            PipelineKind::kInterleaved, 2, true, 3, Recompute::kFull, false)),
    [](const auto& info) { return std::string(info.param.name); });

Layout on_gpu(const char* name, MeshShape mesh, bool sequence_parallel = false, int zero = 0,
              Recompute recompute = Recompute::kNone) {
  return {name, mesh, sequence_parallel, zero, recompute, true, DeviceKind::kCuda};
}

INSTANTIATE_TEST_SUITE_P(
    OneGpu, StoriesGolden,
    ::testing::Values(
        on_gpu("one_rank", mesh_of(1, 1)),
        on_gpu("selective", mesh_of(1, 1), false, 0, Recompute::kSelective),
        on_gpu("full", mesh_of(1, 1), false, 0, Recompute::kFull), on_gpu("tp2", mesh_of(1, 2)),
        on_gpu("tp4", mesh_of(1, 4)), on_gpu("tp8", mesh_of(1, 8)),
        on_gpu("tp2_sp", mesh_of(1, 2), true),
        on_gpu("tp8_sp_full", mesh_of(1, 8), true, 0, Recompute::kFull),
        on_gpu("dp2", mesh_of(2, 1)), on_gpu("dp3_zero1", mesh_of(3, 1), false, 1),
        on_gpu("dp2_zero2", mesh_of(2, 1), false, 2), on_gpu("dp3_zero3", mesh_of(3, 1), false, 3),
        on_gpu("tp2_dp2_zero3_sp_full", mesh_of(2, 2), true, 3, Recompute::kFull),
        on_gpu("tp2_dp2_zero1_sp", mesh_of(2, 2), true, 1),
        on_gpu("tp4_dp2_zero1_sp_selective", mesh_of(2, 4), true, 1, Recompute::kSelective),
        on_gpu("pp2", mesh_of(1, 1, 2)), on_gpu("cp2", mesh_of(1, 1, 1, 2)),
        on_gpu("cp4_full", mesh_of(1, 1, 1, 4), false, 0, Recompute::kFull),
        on_gpu("cp2_dp2_tp2_sp_zero3_selective", mesh_of(2, 2, 1, 2), true, 3,
               Recompute::kSelective),
        on_gpu("cp2_pp2_zero1", mesh_of(1, 1, 2, 2), false, 1),
        on_gpu("tp2_dp2_pp2_sp_zero3_full", mesh_of(2, 2, 2), true, 3, Recompute::kFull)),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
