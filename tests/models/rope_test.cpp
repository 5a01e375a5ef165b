#include "models/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>

#include "models/hf/config_io.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// tools/goldens/make_rope_goldens.py wrote the file, from the papers and in numpy.
Json golden_cases() {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "golden" / "rope.json";
  return Json::parse(test::read_file(path));
}

// A config.json around the rope keys of a golden case.
std::string config_text(const Json& golden, bool newer_keys) {
  Json config = {{"model_type", "llama"},   {"vocab_size", 100},      {"hidden_size", 64},
                 {"intermediate_size", 32}, {"num_hidden_layers", 2}, {"num_attention_heads", 4}};
  config["head_dim"] = golden["head_dim"];
  config["max_position_embeddings"] = golden["max_position_embeddings"];
  if (!newer_keys) {
    config.update(golden["config"]);
    return config.dump();
  }
  Json parameters = golden["config"].value("rope_scaling", Json{{"rope_type", "default"}});
  parameters["rope_theta"] = golden["config"]["rope_theta"];
  config["rope_parameters"] = parameters;
  return config.dump();
}

TEST(Rope, MatchesTheIndependentComputation) {
  const Json cases = golden_cases();
  ASSERT_GE(cases.size(), 25u);
  for (const Json& golden : cases) {
    for (const bool newer_keys : {false, true}) {
      const std::string name =
          golden["name"].get<std::string>() + (newer_keys ? ", newer keys" : "");
      const ModelConfig model = parse_hf_config(config_text(golden, newer_keys), "", name).model;
      const RopeFrequencies got = rope_frequencies(model.rope, model.head_dim,
                                                   golden["sequence_length"].get<std::int64_t>());
      const auto wanted = golden["inverse_frequencies"].get<std::vector<double>>();
      ASSERT_EQ(got.inverse_frequencies.size(), wanted.size()) << name;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(got.inverse_frequencies[i] / wanted[i], 1.0, 1e-12) << name << " pair " << i;
      }
      EXPECT_NEAR(got.attention_scaling, golden["attention_scaling"].get<double>(), 1e-14) << name;
    }
  }
}

// B51: Llama-3.2-1B.
TEST(Rope, Llama3KeepsBlendsAndStretchesTheRightPairs) {
  RopeConfig rope;
  rope.kind = RopeKind::kLlama3;
  rope.theta = 500000.0;
  rope.factor = 32.0;
  rope.original_max_position_embeddings = 8192;
  const RopeFrequencies got = rope_frequencies(rope, 64);
  RopeConfig plain;
  plain.theta = rope.theta;
  const RopeFrequencies base = rope_frequencies(plain, 64);
  for (std::size_t i = 0; i < 32; ++i) {
    const double ratio = got.inverse_frequencies[i] / base.inverse_frequencies[i];
    if (i <= 14) {
      EXPECT_EQ(ratio, 1.0) << i;
    } else if (i <= 17) {
      EXPECT_LT(ratio, 1.0) << i;
      EXPECT_GT(ratio, 1.0 / 32.0) << i;
    } else {
      EXPECT_DOUBLE_EQ(ratio, 1.0 / 32.0) << i;
    }
  }
  EXPECT_EQ(got.attention_scaling, 1.0);
}

// B52: the three factors named there.
TEST(Rope, YarnAttentionFactor) {
  RopeConfig rope;
  rope.kind = RopeKind::kYarn;
  rope.factor = 8.0;
  rope.original_max_position_embeddings = 8192;
  EXPECT_NEAR(rope_frequencies(rope, 64).attention_scaling, 1.20794, 5e-6);
  rope.attention_factor = 1.0;
  EXPECT_EQ(rope_frequencies(rope, 64).attention_scaling, 1.0);
  rope.attention_factor.reset();
  rope.factor = 16.0;
  rope.mscale = 1.0;
  rope.mscale_all_dim = 1.0;
  EXPECT_EQ(rope_frequencies(rope, 64).attention_scaling, 1.0);
}

TEST(Rope, DynamicLeavesRowsWithinTheOriginalLengthAlone) {
  RopeConfig rope;
  rope.kind = RopeKind::kDynamic;
  rope.factor = 2.0;
  rope.original_max_position_embeddings = 2048;
  const auto base = rope_frequencies(RopeConfig{}, 64).inverse_frequencies;
  for (const std::int64_t length : {0, 1, 2048}) {
    EXPECT_EQ(rope_frequencies(rope, 64, length).inverse_frequencies, base) << length;
  }
  const auto longer = rope_frequencies(rope, 64, 4096).inverse_frequencies;
  EXPECT_EQ(longer.front(), 1.0);
  // The slowest pair is stretched by factor * length / original - (factor - 1) = 3.
  EXPECT_NEAR(base.back() / longer.back(), 3.0, 1e-12);
}

TEST(Rope, PartialRotation) {
  RopeConfig rope;
  rope.partial_rotary_factor = 0.25;
  EXPECT_EQ(rotary_dim(rope, 64), 16);
  const RopeFrequencies got = rope_frequencies(rope, 64);
  EXPECT_EQ(got.inverse_frequencies, rope_frequencies(RopeConfig{}, 16).inverse_frequencies);
}

}  // namespace
}  // namespace tessera
