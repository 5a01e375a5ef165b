#include "checkpoint/safetensors_folder.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/safetensors_writer.h"
#include "engine/core/error.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using test::expect_error;
using test::read_file;
using test::TempFolder;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Saves `count` tensors t0, t1, ... of 4 bytes each, all of them `value`.
void save(const std::filesystem::path& folder, int count, char value, std::uint64_t shard_bytes,
          std::string_view stem = "model") {
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < count; ++i) specs.push_back({"t" + std::to_string(i), DType::kU8, {4}});
  SafetensorsFolderWriter writer(folder, specs, shard_bytes, stem);
  const std::string data(4, value);
  for (const SafetensorsSpec& spec : specs) writer.write(spec.name, data.data(), data.size());
  writer.commit();
}

char first_byte(const SafetensorsFolder& folder, std::string_view name) {
  const SafetensorsFolder::Entry& entry = folder.get(name);
  char byte = 0;
  entry.file->read_bytes(*entry.tensor, 0, 1, &byte);
  return byte;
}

TEST(SafetensorsFolder, OneFileWithoutIndex) {
  const TempFolder folder;
  save(folder.path(), 3, 'a', 1000);
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"model.safetensors"});
  const SafetensorsFolder weights(folder.path());
  EXPECT_EQ(weights.entries().size(), 3u);
  EXPECT_EQ(weights.total_bytes(), 12u);
  EXPECT_EQ(first_byte(weights, "t2"), 'a');
  EXPECT_EQ(weights.find("t3"), nullptr);
  expect_error(ErrorKind::kUser, {"t3"}, [&] { weights.get("t3"); });
  EXPECT_EQ(SafetensorsFolder(folder / "model.safetensors").entries().size(), 3u);
}

TEST(SafetensorsFolder, ShardsUnderAnIndex) {
  const TempFolder folder;
  save(folder.path(), 5, 'a', 9);  // two tensors a shard, the last alone
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{
                "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  EXPECT_EQ(read_file(folder / "model.safetensors.index.json"),
            "{\n"
            "  \"metadata\": {\n"
            "    \"total_size\": 20\n"
            "  },\n"
            "  \"weight_map\": {\n"
            "    \"t0\": \"model-00001-of-00003.safetensors\",\n"
            "    \"t1\": \"model-00001-of-00003.safetensors\",\n"
            "    \"t2\": \"model-00002-of-00003.safetensors\",\n"
            "    \"t3\": \"model-00002-of-00003.safetensors\",\n"
            "    \"t4\": \"model-00003-of-00003.safetensors\"\n"
            "  }\n"
            "}\n");
  const SafetensorsFolder weights(folder.path());
  EXPECT_EQ(weights.files().size(), 3u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(first_byte(weights, "t" + std::to_string(i)), 'a');
  EXPECT_EQ(SafetensorsFolder(folder / "model.safetensors.index.json").entries().size(), 5u);
}

TEST(SafetensorsFolder, ATensorAboveTheLimitHasItsOwnShard) {
  const TempFolder folder;
  save(folder.path(), 3, 'a', 1);
  EXPECT_EQ(SafetensorsFolder(folder.path()).files().size(), 3u);
}

// B58: each change of shape of a save, over each other one.
TEST(SafetensorsFolder, ANewSaveLeavesNothingOfTheOld) {
  for (const std::uint64_t old_limit : {4, 8, 1000}) {
    for (const std::uint64_t new_limit : {4, 8, 1000}) {
      const TempFolder folder;
      folder.write("config.json", "{}");
      folder.write("consolidated.safetensors", "stray");
      folder.write("model-00001-of-00002.safetensors.bak", "stray");
      folder.write("adapter_model-00001-of-00009.safetensors", "another stem");
      folder.write(".model-00001-of-00007.safetensors.tmp-0", "killed");
      save(folder.path(), 5, 'a', old_limit);
      save(folder.path(), 4, 'b', new_limit);
      const SafetensorsFolder weights(folder.path());
      EXPECT_EQ(weights.entries().size(), 4u);
      for (const auto& [name, entry] : weights.entries()) EXPECT_EQ(first_byte(weights, name), 'b');
      const std::size_t shards = new_limit == 4 ? 4 : new_limit == 8 ? 2 : 1;
      EXPECT_EQ(names_in(folder.path()).size(), 4 + shards + (shards > 1 ? 1 : 0))
          << old_limit << " then " << new_limit;
      EXPECT_FALSE(std::filesystem::exists(folder / ".model-00001-of-00007.safetensors.tmp-0"));
      EXPECT_EQ(read_file(folder / "consolidated.safetensors"), "stray");
      EXPECT_EQ(read_file(folder / "adapter_model-00001-of-00009.safetensors"), "another stem");
    }
  }
}

TEST(SafetensorsFolder, AnAbandonedSaveLeavesTheOldOne) {
  const TempFolder folder;
  save(folder.path(), 5, 'a', 8);
  const std::vector<std::string> before = names_in(folder.path());
  {
    SafetensorsFolderWriter writer(folder.path(),
                                   {{"t0", DType::kU8, {4}}, {"t1", DType::kU8, {4}}}, 4);
    writer.write("t0", "bbbb", 4);
    writer.write("t1", "bb", 2);
    expect_error(ErrorKind::kInternal, {"after its shard"}, [&] { writer.write("t0", "b", 1); });
    expect_error(ErrorKind::kInternal, {"t9", "not in the list"},
                 [&] { writer.write("t9", "b", 1); });
  }
  EXPECT_EQ(names_in(folder.path()), before);
  EXPECT_EQ(first_byte(SafetensorsFolder(folder.path()), "t4"), 'a');
}

TEST(SafetensorsFolder, TwoStemsShareAFolder) {
  const TempFolder folder;
  save(folder.path(), 4, 'a', 8);
  save(folder.path(), 2, 'b', 1000, "adapter_model");
  EXPECT_EQ(first_byte(SafetensorsFolder(folder.path()), "t0"), 'a');
  EXPECT_EQ(first_byte(SafetensorsFolder(folder.path(), "adapter_model"), "t0"), 'b');
}

TEST(SafetensorsFolder, IndexIsAuthoritativeOverASingleFile) {
  const TempFolder folder;
  save(folder.path(), 4, 'a', 8);
  const TempFolder other;
  save(other.path(), 4, 'z', 1000);
  std::filesystem::copy(other / "model.safetensors", folder / "model.safetensors");
  folder.write("model-00009-of-00009.safetensors", "older shard, broken");
  EXPECT_EQ(first_byte(SafetensorsFolder(folder.path()), "t0"), 'a');
}

TEST(SafetensorsFolder, MissingShardsAreNamed) {
  const TempFolder folder;
  save(folder.path(), 4, 'a', 8);
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");
  expect_error(
      ErrorKind::kUser,
      {"model.safetensors.index.json", "1 of 2 shards", "model-00002-of-00002.safetensors"},
      [&] { SafetensorsFolder weights(folder.path()); });
}

TEST(SafetensorsFolder, TensorsNotInTheirShardAreNamed) {
  const TempFolder folder;
  save(folder.path(), 4, 'a', 8);
  std::string index = read_file(folder / "model.safetensors.index.json");
  index.replace(index.find("model-00001"), 11, "model-00002");  // moves t0
  folder.write("model.safetensors.index.json", index);
  expect_error(ErrorKind::kUser, {"t0 (in model-00002-of-00002.safetensors)"},
               [&] { SafetensorsFolder weights(folder.path()); });
}

TEST(SafetensorsFolder, BrokenIndexIsRefused) {
  const TempFolder folder;
  const auto refuse = [&](std::string_view index, std::initializer_list<std::string_view> parts) {
    folder.write("model.safetensors.index.json", index);
    expect_error(ErrorKind::kUser, parts, [&] { SafetensorsFolder weights(folder.path()); });
  };
  refuse("", {"not valid JSON", "index.json"});
  refuse("[]", {"no weight_map"});
  refuse("{}", {"no weight_map"});
  refuse(R"({"weight_map":[]})", {"no weight_map"});
  refuse(R"({"weight_map":{}})", {"names no tensor"});
  refuse(R"({"weight_map":{"a":3}})", {"places a in 3"});
  refuse(R"({"weight_map":{"a":"../x.safetensors"}})", {"places a", "same folder"});
  refuse(R"({"weight_map":{"a":"/etc/passwd"}})", {"places a"});
  refuse(R"({"weight_map":{"a":".."}})", {"places a"});
  refuse(R"({"weight_map":{"a":"x\u0000y"}})", {"places a"});
  refuse(R"({"weight_map":{"a":"x","a":"y"}})", {"\"a\" is given twice"});
  refuse(std::string(3000, '['), {"nested"});
}

TEST(SafetensorsFolder, AFolderWithoutWeightsSaysWhatItHolds) {
  const TempFolder folder;
  expect_error(ErrorKind::kUser, {"no weights at all"},
               [&] { SafetensorsFolder w(folder.path()); });
  folder.write("pytorch_model.bin", "x");
  expect_error(ErrorKind::kUser, {"model.safetensors", "pytorch_model.bin"},
               [&] { SafetensorsFolder w(folder.path()); });
  expect_error(ErrorKind::kUser, {"nowhere"}, [&] { SafetensorsFolder w(folder / "nowhere"); });
}

}  // namespace
}  // namespace tessera
