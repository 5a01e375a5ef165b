#include "models/hf/names.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/json_text.h"
#include "engine/core/error.h"
#include "models/hf/config_io.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using test::expect_error;
using test::TempFolder;

ModelConfig tiny_model(bool tied = false) {
  ModelConfig model;
  model.vocab_size = 11;
  model.hidden_size = 6;
  model.intermediate_size = 10;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 2;
  model.num_key_value_heads = 1;
  model.head_dim = 4;
  model.max_position_embeddings = 16;
  model.tie_word_embeddings = tied;
  return model;
}

using Specs = std::vector<SafetensorsSpec>;

// Saves zeros under `specs`; the byte 1 in every tensor named in `ones`.
void save(const TempFolder& folder, const Specs& specs, const std::set<std::string>& ones = {}) {
  SafetensorsFolderWriter writer(folder.path(), specs, 500);
  for (const SafetensorsSpec& spec : specs) {
    std::vector<char> bytes(spec.bytes(), 0);
    if (ones.contains(spec.name)) bytes.back() = 1;
    writer.write(spec.name, bytes.data(), bytes.size());
  }
  writer.commit();
}

HfNameMap match(const ModelConfig& config, const TempFolder& folder,
                TiedDuplicate tied = TiedDuplicate::kCompare) {
  return match_hf_tensors(config, SafetensorsFolder(folder.path()), tied);
}

std::set<std::string> names_of(const ModelConfig& config) {
  std::set<std::string> names;
  for (const HfTensor& tensor : hf_tensors(config)) names.insert(tensor.name);
  return names;
}

TEST(HfNames, ListsEveryParameterWithItsShape) {
  ModelConfig model = tiny_model();
  const std::vector<HfTensor> list = hf_tensors(model);
  EXPECT_EQ(list.size(), 3u + 2 * 9);
  EXPECT_EQ(list.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(list.front().shape, (std::vector<std::int64_t>{11, 6}));
  EXPECT_EQ(list.back().name, "lm_head.weight");
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const HfTensor& tensor : list) shapes[tensor.name] = tensor.shape;
  using Dims = std::vector<std::int64_t>;
  // B50: heads * head_dim, not hidden_size.
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.q_proj.weight"), (Dims{8, 6}));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.k_proj.weight"), (Dims{4, 6}));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.v_proj.weight"), (Dims{4, 6}));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.o_proj.weight"), (Dims{6, 8}));
  EXPECT_EQ(shapes.at("model.layers.0.mlp.gate_proj.weight"), (Dims{10, 6}));
  EXPECT_EQ(shapes.at("model.layers.0.mlp.up_proj.weight"), (Dims{10, 6}));
  EXPECT_EQ(shapes.at("model.layers.0.mlp.down_proj.weight"), (Dims{6, 10}));
  EXPECT_EQ(shapes.at("model.layers.0.input_layernorm.weight"), (Dims{6}));
  EXPECT_EQ(shapes.at("model.layers.0.post_attention_layernorm.weight"), (Dims{6}));
  EXPECT_EQ(shapes.at("model.norm.weight"), (Dims{6}));
  EXPECT_FALSE(names_of(tiny_model(true)).contains("lm_head.weight"));

  model.attention_qkv_bias = model.attention_o_bias = model.mlp_bias = model.qk_norm = true;
  EXPECT_EQ(hf_tensors(model).size(), 3u + 2 * (9 + 7 + 2));
  shapes.clear();
  for (const HfTensor& tensor : hf_tensors(model)) shapes[tensor.name] = tensor.shape;
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.q_proj.bias"), (Dims{8}));
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.o_proj.bias"), (Dims{6}));
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.q_norm.weight"), (Dims{4}));
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.k_norm.weight"), (Dims{4}));
  EXPECT_EQ(shapes.at("model.layers.0.mlp.down_proj.bias"), (Dims{6}));
}

TEST(HfNames, AgreeWithARealIndex) {
  TESSERA_REQUIRE_DATA(path, "configs/Llama-2-1.3b-hf-sharded");
  const auto index =
      parse_json_text(test::read_file(path / "model.safetensors.index.json"), "index", "test");
  std::set<std::string> in_index;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    if (!name.ends_with("rotary_emb.inv_freq")) in_index.insert(name);
  }
  const ModelConfig model = load_hf_config(path).model;
  EXPECT_EQ(names_of(model), in_index);
  EXPECT_EQ(4 * parameter_count(model), index["metadata"]["total_size"].get<std::int64_t>());
}

TEST(HfNames, RealModelMatches) {
  TESSERA_REQUIRE_DATA(path, "models/stories260K/hf");
  const HfNameMap map = match_hf_tensors(load_hf_config(path).model, SafetensorsFolder(path));
  EXPECT_EQ(map.file_name_of.size(), 47u);
  EXPECT_TRUE(map.notes.empty());
}

TEST(HfNames, AcceptsWhatItWrites) {
  for (const bool tied : {false, true}) {
    const TempFolder folder;
    save(folder, export_specs(tiny_model(tied), DType::kBF16));
    const HfNameMap map = match(tiny_model(tied), folder);
    EXPECT_EQ(map.file_name_of.size(), hf_tensors(tiny_model(tied)).size());
    for (const auto& [ours, theirs] : map.file_name_of) EXPECT_EQ(ours, theirs);
    EXPECT_TRUE(map.notes.empty());
  }
}

// B48.
TEST(HfNames, TiedDuplicateMustBeEqual) {
  Specs specs = export_specs(tiny_model(false), DType::kF32);
  {
    const TempFolder folder;
    save(folder, specs);
    EXPECT_EQ(match(tiny_model(true), folder).notes.size(), 1u);
  }
  const TempFolder folder;
  save(folder, specs, {"lm_head.weight"});
  expect_error(
      ErrorKind::kUser,
      {"lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings to false"},
      [&] { match(tiny_model(true), folder); });
  EXPECT_NO_THROW(match(tiny_model(true), folder, TiedDuplicate::kTrust));
  specs.back().dtype = DType::kBF16;
  save(folder, specs);
  expect_error(ErrorKind::kUser, {"lm_head.weight differs"},
               [&] { match(tiny_model(true), folder); });
}

TEST(HfNames, UntiedModelWithoutHeadIsRefused) {
  const TempFolder folder;
  save(folder, export_specs(tiny_model(true), DType::kF32));
  expect_error(ErrorKind::kUser, {"1 missing: lm_head.weight", "tie_word_embeddings to true"},
               [&] { match(tiny_model(false), folder); });
}

TEST(HfNames, OlderPrefixesAndBuffersAreUnderstood) {
  const TempFolder folder;
  Specs specs = export_specs(tiny_model(true), DType::kF32);
  for (SafetensorsSpec& spec : specs) spec.name = spec.name.substr(6);
  specs.push_back({"layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {2}});
  save(folder, specs);
  const HfNameMap map = match(tiny_model(true), folder);
  EXPECT_EQ(map.file_name_of.at("model.layers.1.mlp.up_proj.weight"),
            "layers.1.mlp.up_proj.weight");
  EXPECT_EQ(map.notes.size(), 1u);
  specs.back().name = "rotary_emb.inv_freq";
  specs.push_back({"lm_head.weight", DType::kF32, {11, 6}});
  save(folder, specs);
  EXPECT_EQ(match(tiny_model(false), folder).file_name_of.at("lm_head.weight"), "lm_head.weight");
}

TEST(HfNames, EveryMistakeIsInOneMessage) {
  Specs specs = export_specs(tiny_model(false), DType::kF32);
  const TempFolder folder;
  std::erase_if(specs, [](const SafetensorsSpec& s) { return s.name == "model.norm.weight"; });
  for (SafetensorsSpec& spec : specs) {
    if (spec.name == "model.layers.0.self_attn.k_proj.weight") spec.shape = {8, 6};
    if (spec.name == "model.layers.1.mlp.up_proj.weight") spec.dtype = DType::kI64;
  }
  specs.push_back({"model.layers.0.self_attn.q_proj.bias", DType::kF32, {8}});
  specs.push_back({"model.layers.2.mlp.up_proj.weight", DType::kF32, {10, 6}});
  save(folder, specs);
  expect_error(
      ErrorKind::kUser,
      {"1 missing: model.norm.weight",
       "1 of the wrong shape: model.layers.0.self_attn.k_proj.weight [8, 6] instead of [4, 6]",
       "1 not in floating point: model.layers.1.mlp.up_proj.weight (I64)",
       "2 unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight"},
      [&] { match(tiny_model(false), folder); });
}

TEST(HfNames, LongListsAreCut) {
  const TempFolder folder;
  save(folder, {{"something.else", DType::kF32, {1}}});
  const std::string text =
      expect_error(ErrorKind::kUser, {"21 missing", "and 13 more", "1 unexpected: something.else"},
                   [&] { match(tiny_model(false), folder); });
  EXPECT_LT(text.size(), 1200u);
}

TEST(HfNames, QuantisedFilesAreNamed) {
  const TempFolder folder;
  save(folder, {{"model.layers.0.mlp.up_proj.qweight", DType::kI32, {1, 10}}});
  expect_error(ErrorKind::kUser, {"quantised"}, [&] { match(tiny_model(false), folder); });
}

}  // namespace
}  // namespace tessera
