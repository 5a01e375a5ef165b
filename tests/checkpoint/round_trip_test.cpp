#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/safetensors.h"
#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using test::HostStates;
using test::Rank;

struct TensorCase {
  std::string name;
  DType dtype;
  Shape shape;
};

const std::vector<TensorCase>& tensor_cases() {
  static const std::vector<TensorCase> cases = {
      {"weight/a", DType::kF32, {61, 37}},    {"weight/b", DType::kBF16, {128, 96}},
      {"weight/wide", DType::kF32, {2, 4099}}, {"weight/norm", DType::kF32, {257}},
      {"weight/one", DType::kF16, {1}},        {"adam_m/a", DType::kF64, {61, 37}},
      {"state/bytes", DType::kU8, {1031}},     {"state/f8", DType::kF8E4M3, {33, 5}},
      {"state/f8b", DType::kF8E5M2, {7}},      {"cursor", DType::kI64, {3}},
      {"flags", DType::kI32, {5, 3}},          {"empty", DType::kF32, {0, 4}},
      {"empty1", DType::kF32, {0}}};
  return cases;
}

// What rank `rank` of `ranks` holds under the layout drawn by `seed`. Every rank draws the whole layout.
HostStates random_layout(int rank, int ranks, unsigned seed, bool copies, bool convert) {
  std::mt19937 random(seed);
  HostStates result;
  const auto& cases = tensor_cases();
  result.states().reserve(2 * cases.size());
  for (const TensorCase& tensor : cases) {
    const std::int64_t cols = tensor.shape.rank == 2 ? tensor.shape[1] : 1;
    const auto cuts = test::random_cuts(tensor.shape[0], cols, ranks, random);
    NamedState& state = result.add(tensor.name, tensor.dtype, tensor.shape);
    std::optional<DType> dtype;
    if (convert && (tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16 ||
                    tensor.dtype == DType::kF16 || tensor.dtype == DType::kF64)) {
      constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
      dtype = kFloats[random() % 4];
    }
    for (const test::Cut& cut : cuts) {
      if (cut.owner == rank) {
        result.add_piece(state, cut.row_begin, cut.rows, cut.col_begin, cut.cols, dtype);
      }
    }
    if (random() % 4 == 0) result.add_piece(state, tensor.shape[0], 0, 0, cols, dtype);  // empty
    if (copies && random() % 2 == 0) {
      NamedState& copy = result.add(tensor.name, tensor.dtype, tensor.shape);
      copy.writes = false;
      result.add_piece(copy, 0, tensor.shape[0], 0, cols, dtype);
    }
  }
  return result;
}

TEST(CheckpointRoundTrip, AnyLayoutReadsWhatAnyLayoutWrote) {
  unsigned seed = 1;
  for (int writers = 1; writers <= 7; ++writers) {
    const test::TempFolder folder;
    const std::int64_t step = 100 * writers;
    test::run_ranks(writers, [&](Rank& rank) {
      HostStates states = random_layout(rank.rank(), writers, seed, true, false);
      states.fill(writers);
      CheckpointWriterOptions options;
      options.block_bytes = writers % 2 == 0 ? 4096 : 8192;
      options.threads = 1 + writers % 3;
      CheckpointWriter writer(folder.path(), rank.world, rank.stream, options);
      EXPECT_TRUE(writer.save(step, states.states(), "{\"writers\":1}", rank.stream));
    });
    const auto latest = find_latest_checkpoint(folder.path());
    ASSERT_TRUE(latest.has_value());
    EXPECT_TRUE(verify_checkpoint(*latest).empty());
    const CheckpointReader reader(*latest);
    EXPECT_EQ(reader.step(), step);
    EXPECT_EQ(reader.ranks(), writers);
    EXPECT_EQ(reader.metadata(), "{\"writers\":1}");
    EXPECT_EQ(reader.tensors().size(), tensor_cases().size());
    for (int readers = 1; readers <= 5; ++readers) {
      ++seed;
      test::run_ranks(readers, [&](Rank& rank) {
        HostStates states = random_layout(rank.rank(), readers, seed, true, readers % 2 == 1);
        reader.read(states.states(), rank.stream);
        EXPECT_EQ(states.difference(writers), "") << writers << " to " << readers;
      });
    }
  }
}

TEST(CheckpointRoundTrip, FilesAreValidSafetensors) {
  const test::TempFolder folder;
  test::run_ranks(2, [&](Rank& rank) {
    HostStates states = test::banded_states(rank.rank(), 2);
    states.fill(3);
    CheckpointWriter writer(folder.path(), rank.world, rank.stream);
    writer.save(7, states.states(), "{}", rank.stream);
  });
  const SafetensorsFile first(folder / "step-000007/rank-00000.safetensors");
  const SafetensorsFile second(folder / "step-000007/rank-00001.safetensors");
  EXPECT_EQ(first.data_start() % 4096, 0u);
  EXPECT_EQ(first.metadata().at("step"), "7");
  const SafetensorsTensor& tensor = second.get("weight/matrix[32:64,0:48]");
  EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{32, 48}));
  std::vector<float> values(32 * 48);
  second.read_elements(tensor, 0, 32 * 48, values.data());
  EXPECT_EQ(values[5], test::element_value(32 * 48 + 5, 3));
  EXPECT_EQ(second.get("adam_m/vector[32:64]").shape, (std::vector<std::int64_t>{32}));
  EXPECT_NE(first.find("counter"), nullptr);
  EXPECT_EQ(second.find("counter"), nullptr);
}

TEST(CheckpointRoundTrip, FurtherFilesAreKept) {
  const test::TempFolder folder;
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = test::banded_states(0, 1);
    CheckpointWriter writer(folder.path(), rank.world, rank.stream);
    writer.save(1, states.states(), "{}", rank.stream, {{"config.yaml", "a: 1\n"}, {"none", ""}});
  });
  const CheckpointReader reader(folder / "step-000001");
  EXPECT_TRUE(reader.has_file("config.yaml"));
  EXPECT_EQ(reader.read_file("config.yaml"), "a: 1\n");
  EXPECT_EQ(reader.read_file("none"), "");
  test::expect_error(ErrorKind::kUser, {"holds no", "other"}, [&] { reader.read_file("other"); });
}

TEST(CheckpointRoundTrip, WhatDoesNotFitIsNamed) {
  const test::TempFolder folder;
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = test::banded_states(0, 1);
    states.fill(1);
    CheckpointWriter writer(folder.path(), rank.world, rank.stream);
    writer.save(1, states.states(), "{}", rank.stream);
    const CheckpointReader reader(folder / "step-000001");

    HostStates wanted;
    wanted.states().reserve(4);
    NamedState& missing = wanted.add("weight/other", DType::kF32, {64, 48});
    NamedState& larger = wanted.add("weight/matrix", DType::kF32, {65, 48});
    NamedState& integer = wanted.add("counter", DType::kI64, {1});
    wanted.add_piece(integer, 0, 1, 0, 1, DType::kF32);
    NamedState& beyond = wanted.add("weight/matrix", DType::kF32, {64, 48});
    wanted.add_piece(beyond, 60, 8, 0, 48);
    test::expect_error(ErrorKind::kUser, {"holds no weight/other"},
                       [&] { reader.read(missing, rank.stream); });
    test::expect_error(ErrorKind::kUser, {"weight/matrix is [64, 48], wanted [65, 48]"},
                       [&] { reader.read(larger, rank.stream); });
    test::expect_error(ErrorKind::kUser, {"counter is int64", "fp32"},
                       [&] { reader.read(integer, rank.stream); });
    test::expect_error(ErrorKind::kUser, {"192 of 384", "weight/matrix", "rows 60 to 68"},
                       [&] { reader.read(beyond, rank.stream); });
  });
}

// Two ranks that write one region, or none that does, are a bug of the caller that no later reader
// must find out about.
TEST(CheckpointRoundTrip, PiecesMustCoverEveryTensorOnce) {
  const test::TempFolder folder;
  const auto save = [&](std::int64_t gap) {
    test::run_ranks(2, [&](Rank& rank) {
      HostStates states;
      NamedState& state = states.add("weight/matrix", DType::kF32, {10, 4});
      if (rank.rank() == 0) states.add_piece(state, 0, 5, 0, 4);
      if (rank.rank() == 1) states.add_piece(state, 5 + gap, 5 - gap, 0, 4);
      CheckpointWriter writer(folder.path(), rank.world, rank.stream);
      writer.save(1, states.states(), "{}", rank.stream);
    });
  };
  test::expect_error(ErrorKind::kInternal, {"only 36 of 40 elements", "weight/matrix"},
                     [&] { save(1); });
  test::expect_error(ErrorKind::kInternal, {"rows 4 to 5", "weight/matrix", "stored twice"},
                     [&] { save(-1); });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  save(0);
  EXPECT_TRUE(find_latest_checkpoint(folder.path()).has_value());
}

}  // namespace
}  // namespace tessera
