// Every byte of a checkpoint is guarded: a flipped bit anywhere is found, and named.
#include <gtest/gtest.h>

#include <fstream>

#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::HostStates;
using test::Rank;

void save_one(const fs::path& folder) {
  test::run_ranks(2, [&](Rank& rank) {
    HostStates states = test::banded_states(rank.rank(), 2);
    states.fill(1);
    CheckpointWriterOptions options;
    options.block_bytes = 4096;
    CheckpointWriter writer(folder, rank.world, rank.stream, options);
    writer.save(1, states.states(), "{\"step\":1}", rank.stream, {{"config.yaml", "x: 1\n"}});
  });
}

void flip(const fs::path& path, std::uint64_t bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file.good());
  file.seekg(static_cast<std::streamoff>(bit / 8));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(bit / 8));
  file.put(static_cast<char>(byte ^ (1 << (bit % 8))));
}

TEST(CheckpointDamage, EveryFlippedBitIsFound) {
  const test::TempFolder folder;
  save_one(folder.path());
  const fs::path checkpoint = folder / "step-000001";
  ASSERT_TRUE(verify_checkpoint(checkpoint).empty());
  std::mt19937_64 random(5);
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    const std::uint64_t bits = 8 * fs::file_size(entry.path());
    // The small files whole, the data files at random and at their ends.
    std::vector<std::uint64_t> places = {0, 7, bits - 1, bits - 8};
    const bool is_small = bits < 8 * 64;
    for (std::uint64_t i = 0; i < (is_small ? bits : 60); ++i) {
      places.push_back(is_small ? i : random() % bits);
    }
    for (const std::uint64_t bit : places) {
      flip(entry.path(), bit);
      EXPECT_FALSE(verify_checkpoint(checkpoint).empty()) << entry.path() << " bit " << bit;
      flip(entry.path(), bit);
    }
  }
  EXPECT_TRUE(verify_checkpoint(checkpoint).empty());
}

TEST(CheckpointDamage, TheTensorIsNamedAndOthersCanBeRead) {
  const test::TempFolder folder;
  save_one(folder.path());
  const fs::path checkpoint = folder / "step-000001";
  const fs::path file = checkpoint / "rank-00001.safetensors";
  // Rank 1 holds rows 32 to 64 of the matrix (6144 bytes from byte 4096) and 64 bytes of the vector.
  flip(file, 8 * 4200);
  const std::vector<CheckpointDamage> damages = verify_checkpoint(checkpoint);
  ASSERT_EQ(damages.size(), 1u);
  EXPECT_EQ(damages[0].file, "rank-00001.safetensors");
  EXPECT_NE(damages[0].text.find("bytes 4096 to 8192"), std::string::npos) << damages[0].text;
  EXPECT_NE(damages[0].text.find("weight/matrix[32:64,0:48]"), std::string::npos) << damages[0].text;
  test::run_ranks(1, [&](Rank& rank) {
    const CheckpointReader reader(checkpoint);
    HostStates states = test::banded_states(0, 1);
    test::expect_error(ErrorKind::kUser, {"rank-00001.safetensors is damaged", "weight/matrix"},
                       [&] { reader.read(states.states(), rank.stream); });
    // A piece that does not touch the bad block.
    HostStates good;
    NamedState& matrix = good.add("weight/matrix", DType::kF32, {64, 48});
    good.add_piece(matrix, 0, 32, 0, 48);
    reader.read(matrix, rank.stream);
    EXPECT_EQ(good.difference(1), "");
    // A small piece of a bad block is refused as well.
    HostStates bad;
    NamedState& part = bad.add("weight/matrix", DType::kF32, {64, 48});
    bad.add_piece(part, 40, 1, 3, 2);
    test::expect_error(ErrorKind::kUser, {"damaged"}, [&] { reader.read(part, rank.stream); });
  });
}

TEST(CheckpointDamage, CutAndMissingFiles) {
  const test::TempFolder folder;
  for (const char* name : {"rank-00000.safetensors", "index.json", "metadata.json", "commit.json",
                           "config.yaml"}) {
    for (const bool is_cut : {true, false}) {
      save_one(folder.path());
      const fs::path file = folder / "step-000001" / name;
      if (is_cut) {
        fs::resize_file(file, fs::file_size(file) - 1);
      } else {
        fs::remove(file);
      }
      const std::vector<CheckpointDamage> damages = verify_checkpoint(folder / "step-000001");
      ASSERT_EQ(damages.size(), 1u) << name;
      EXPECT_NE(damages[0].text.find(name), std::string::npos) << damages[0].text;
      EXPECT_THROW(CheckpointReader(folder / "step-000001"), Error);
      EXPECT_FALSE(find_latest_checkpoint(folder.path()).has_value());
    }
  }
}

// A file that grows, or shrinks while it is read, is an error and not a crash.
TEST(CheckpointDamage, AFileCutWhileOpen) {
  const test::TempFolder folder;
  save_one(folder.path());
  const CheckpointReader reader(folder / "step-000001");
  fs::resize_file(folder / "step-000001/rank-00000.safetensors", 4096);
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = test::banded_states(0, 1);
    test::expect_error(ErrorKind::kTransient, {"rank-00000.safetensors", "cut"},
                       [&] { reader.read(states.states(), rank.stream); });
  });
}

TEST(CheckpointDamage, NotACheckpoint) {
  const test::TempFolder folder;
  EXPECT_EQ(verify_checkpoint(folder / "none").size(), 1u);
  EXPECT_EQ(verify_checkpoint(folder.path()).size(), 1u);
  folder.write("commit.json", "{}");
  test::expect_error(ErrorKind::kUser, {"commit.json"}, [&] { CheckpointReader reader(folder.path()); });
}

}  // namespace
}  // namespace tessera
