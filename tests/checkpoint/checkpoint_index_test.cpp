#include "checkpoint/checkpoint_index.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"

namespace tessera {
namespace {

CheckpointIndex example() {
  CheckpointIndex index;
  index.block_bytes = 4096;
  index.files.push_back({"rank-00000.safetensors", 4096 + 4096, {1, 0xffffffffu}});
  index.files.push_back({"rank-00001.safetensors", 4096 + 96, {7, 8}});
  CheckpointTensor& matrix = index.tensors["weight/a \"quoted\" \xc3\xa9"];
  matrix.dtype = DType::kF32;
  matrix.shape = {8, 6};
  matrix.extents = {{0, 0, 8, 0, 3, 4096}, {1, 0, 8, 3, 3, 4096}};
  CheckpointTensor& vector = index.tensors["norm"];
  vector.dtype = DType::kBF16;
  vector.shape = {4};
  vector.extents = {{0, 0, 4, 0, 1, 4192}};
  index.tensors["empty"].shape = {0, 3};
  return index;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " in " << text;
  return text.replace(at, from.size(), to);
}

TEST(CheckpointIndex, TextAndBack) {
  const CheckpointIndex index = example();
  const std::string text = format_index(index);
  const CheckpointIndex read = parse_index(text, "index.json");
  EXPECT_EQ(format_index(read), text);
  EXPECT_EQ(read.files[1].checksums, (std::vector<std::uint32_t>{7, 8}));
  EXPECT_EQ(read.tensors.size(), 3u);
  EXPECT_EQ(read.tensors.at("norm").extents[0].offset, 4192u);
  EXPECT_EQ(read.coverage_problem(), "");
}

TEST(CheckpointIndex, EveryNumberIsChecked) {
  const std::string text = format_index(example());
  const std::pair<const char*, const char*> changes[] = {
      {"[0,0,8,0,3,4096]", "[2,0,8,0,3,4096]"},                     // no such file
      {"[0,0,8,0,3,4096]", "[0,1,8,0,3,4096]"},                     // outside the tensor
      {"[0,0,8,0,3,4096]", "[0,0,8,4,3,4096]"},
      {"[0,0,8,0,3,4096]", "[0,0,0,0,3,4096]"},                     // empty
      {"[0,0,8,0,3,4096]", "[0,0,8,0,3,4098]"},                     // splits elements
      {"[0,0,8,0,3,4096]", "[0,0,8,0,3,8192]"},                     // behind the file's end
      {"[0,0,8,0,3,4096]", "[0,9223372036854775807,8,0,3,4096]"},
      {"[0,0,8,0,3,4096]", "[0,0,8,0,3,9223372036854775804]"},
      {"[0,0,8,0,3,4096]", "[0,0,8,0,3]"},
      {"[0,0,8,0,3,4096]", "[0,0,-8,0,3,4096]"},
      {"[0,0,8,0,3,4096]", "[0,0,8.0,0,3,4096]"},
      {"[8,6]", "[4294967296,4294967296]"},
      {"[8,6]", "[8,6,1]"},
      {"[8,6]", "[]"},
      {"\"F32\"", "\"F33\""},
      {"\"block_bytes\":4096", "\"block_bytes\":0"},
      {"\"block_bytes\":4096", "\"block_bytes\":2048"},
      {"\"bytes\":8192", "\"bytes\":8193"},                         // one checksum too few
      {"00000001ffffffff", "0000001ffffffff"},
      {"00000001ffffffff", "0000000gffffffff"},
      {"rank-00001", "../rank-00001"},
      {"rank-00001.safetensors", ""},
      {"\"rank-00001.safetensors\"", "17"},
      {"\"tensors\":{", "\"tensors\":[{"},
      {"\"format\":\"tessera-checkpoint\"", "\"format\":\"other\""},
      {"\"version\":1", "\"version\":2"},
      {"\"extents\"", "\"extends\""},
  };
  for (const auto& [from, to] : changes) {
    test::expect_error(ErrorKind::kUser, {"index.json"},
                       [&] { parse_index(replaced(text, from, to), "index.json"); });
  }
  for (std::size_t length = 0; length + 1 < text.size(); ++length) {
    EXPECT_THROW(parse_index(text.substr(0, length), "index.json"), Error) << length;
  }
}

TEST(CheckpointIndex, CoverageIsExact) {
  CheckpointIndex index = example();
  auto& extents = index.tensors.begin()->second;
  (void)extents;
  CheckpointTensor& tensor = index.tensors.at("norm");
  tensor.extents = {{0, 0, 3, 0, 1, 4192}};
  EXPECT_EQ(index.coverage_problem(), "only 3 of 4 elements of norm are stored");
  tensor.extents.push_back({0, 2, 2, 0, 1, 4192});
  EXPECT_EQ(index.coverage_problem(), "elements 2 to 3 of norm are stored twice");
  tensor.extents[1].row_begin = 3;
  tensor.extents[1].rows = 1;
  EXPECT_EQ(index.coverage_problem(), "");
  CheckpointTensor& matrix = index.tensors.at("weight/a \"quoted\" \xc3\xa9");
  matrix.extents = {{0, 0, 8, 0, 2, 0}, {0, 0, 5, 2, 4, 0}, {0, 5, 3, 2, 4, 0}};
  EXPECT_EQ(index.coverage_problem(), "");
  matrix.extents[2] = {0, 4, 4, 2, 3, 0};  // as many elements, but twice here and never there
  EXPECT_NE(index.coverage_problem().find("rows 4 to 5 and columns 2 to 5"), std::string::npos)
      << index.coverage_problem();
}

TEST(CheckpointIndex, MergeRefusesDisagreement) {
  CheckpointIndex ours = example();
  CheckpointIndex theirs = example();
  theirs.tensors.at("norm").dtype = DType::kF32;
  test::expect_error(ErrorKind::kInternal, {"norm is bf16 [4] on one rank and fp32 [4] on another"},
                     [&] { ours.merge(theirs); });
}

TEST(CommitRecord, TextAndBack) {
  CommitRecord record;
  record.step = 500;
  record.sequence = 12;
  record.ranks = 64;
  record.files["index.json"] = {123, 0xdeadbeefu};
  record.files["rank-00000.safetensors"] = {1'000'000'000'000, std::nullopt};
  const std::string text = format_commit(record);
  const CommitRecord read = parse_commit(text, "commit.json");
  EXPECT_EQ(read.step, 500);
  EXPECT_EQ(read.sequence, 12u);
  EXPECT_EQ(read.ranks, 64);
  EXPECT_EQ(read.total_bytes(), 1'000'000'000'123u);
  EXPECT_EQ(*read.files.at("index.json").checksum, 0xdeadbeefu);
  EXPECT_FALSE(read.files.at("rank-00000.safetensors").checksum.has_value());
}

TEST(CommitRecord, EveryFlippedBitIsSeen) {
  CommitRecord record;
  record.step = 3;
  record.files["metadata.json"] = {2, 1u};
  std::string text = format_commit(record);
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THROW(parse_commit(text, "commit.json"), Error) << bit << ": " << text;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
  }
}

}  // namespace
}  // namespace tessera
