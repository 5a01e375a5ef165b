// Rows: cut-off lengths (kind B90), packing, held-out parts, mixtures.
#include "data/packing.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "data/pack_source.h"
#include "data/permutation.h"
#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

using test::all_rows;
using test::DataTest;
using test::text_of;

class Packing : public DataTest {
 protected:
  static std::string tokens_row(int first, int count) {
    std::string row = "{\"input_ids\":[";
    for (int i = 0; i < count; ++i) {
      row += (i > 0 ? "," : "") + std::to_string((first + i) % 250);
    }
    return row + "]}\n";
  }
  const PackingCounts& counts(const Dataset& data) { return data.sources()[0].rows->counts(); }
};

TEST_F(Packing, LengthsAroundTheLimit) {
  // Rows of 16 pairs take 17 tokens. Lengths 1, max - 1, max, max + 1 and ten times max.
  options.packing = false;
  const std::string bytes = tokens_row(0, 1) + tokens_row(10, 16) + tokens_row(30, 17) +
                            tokens_row(50, 18) + tokens_row(70, 170);
  auto data = prepare_file("a.jsonl", bytes);  // auto: split, since there are no labels
  EXPECT_EQ(data->num_rows(), 1 + 1 + 2 + 11);
  EXPECT_EQ(counts(*data).too_short, 1);
  EXPECT_EQ(counts(*data).split, 2);
  EXPECT_EQ(counts(*data).target_tokens, 15 + 16 + 17 + 169);

  options.overlong = "cut";
  data = prepare_file("a.jsonl", bytes);
  EXPECT_EQ(data->num_rows(), 4);
  EXPECT_EQ(counts(*data).cut, 2);
  EXPECT_EQ(counts(*data).cut_pairs, 1 + 153);

  options.overlong = "drop";
  data = prepare_file("a.jsonl", bytes);
  EXPECT_EQ(data->num_rows(), 2);
  EXPECT_EQ(counts(*data).dropped, 2);
}

TEST_F(Packing, SplittingLosesNoPair) {
  settings.sequence_length = 7;
  const std::string bytes = tokens_row(3, 100);
  for (const bool packing : {true, false}) {
    options.packing = packing;
    std::multiset<std::pair<int, int>> pairs;
    for (const auto& row : all_rows(*prepare_file("a.jsonl", bytes))) {
      for (std::size_t i = 0; i < row.inputs.size(); ++i) {
        pairs.insert({row.inputs[i], row.targets[i]});
        if (i > 0 && row.positions[i] > 0) {
          EXPECT_EQ(row.targets[i - 1], row.inputs[i]);
        }
      }
    }
    std::multiset<std::pair<int, int>> expected;
    for (int i = 0; i < 99; ++i) expected.insert({3 + i, 4 + i});
    EXPECT_EQ(pairs, expected);
  }
}

TEST_F(Packing, LabelledRowsAreCutUnlessAskedOtherwise) {
  // The prompt alone fills the row: nothing is left to train when cut (kind B02).
  std::string ids, labels;
  for (int i = 0; i < 40; ++i) {
    ids += (i > 0 ? "," : "") + std::to_string(i);
    labels += (i > 0 ? "," : "") + std::to_string(i < 20 ? -100 : i);
  }
  const std::string bytes = "{\"input_ids\":[" + ids + "],\"labels\":[" + labels + "]}\n" +
                            "{\"input_ids\":[1,2,3],\"labels\":[-100,2,3]}\n";
  auto data = prepare_file("a.jsonl", bytes);
  EXPECT_EQ(counts(*data).cut, 1);
  EXPECT_EQ(counts(*data).without_target, 1);
  EXPECT_EQ(counts(*data).target_tokens, 2);
  options.overlong = "split";
  data = prepare_file("a.jsonl", bytes);
  // Chunks 0-15 (no target), 16-31 (targets from 20 on: pairs 19..31) and 32-38.
  EXPECT_EQ(counts(*data).without_target, 1);
  EXPECT_EQ(counts(*data).target_tokens, 2 + 13 + 7);
}

TEST_F(Packing, DocumentsOfARecordStayTogether) {
  options.packing = false;
  const auto rows = all_rows(*prepare_file(
      "a.jsonl", "{\"input_ids\":[5,6,7,8,9],\"position_ids\":[0,1,0,1,2]}\n" + tokens_row(1, 3)));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].lengths, std::vector<std::int32_t>({1, 2}));
}

TEST_F(Packing, EveryPieceOnceAndNoRowTooLong) {
  settings.sequence_length = 100;
  std::string bytes;
  std::int64_t pairs = 0;
  for (int i = 0; i < 3000; ++i) {
    const int length = 2 + (i * 7919) % 140;
    bytes += tokens_row(i, length);
    pairs += length - 1;
  }
  const auto data = prepare_file("a.jsonl", bytes);
  std::map<std::uint64_t, std::set<std::pair<std::uint64_t, std::uint32_t>>> seen;
  std::int64_t total = 0;
  for (std::int64_t row = 0; row < data->num_rows(); ++row) {
    std::int64_t used = 0;
    for (const Piece& piece : data->pieces(row)) {
      EXPECT_TRUE(seen[piece.document].insert({piece.begin, piece.length}).second);
      used += piece.length;
    }
    EXPECT_LE(used, 100);
    EXPECT_LE(static_cast<std::int64_t>(data->pieces(row).size()), max_pieces_per_row(100));
    total += used;
  }
  EXPECT_EQ(total, pairs);
  EXPECT_EQ(counts(*data).pairs, pairs);
  const double fill = static_cast<double>(pairs) / (100.0 * static_cast<double>(data->num_rows()));
  EXPECT_GT(fill, 0.98);
}

TEST_F(Packing, ManyWindowsFillWellInBoundedRows) {
  std::int64_t rows = 0, pairs = 0;
  std::vector<int> seen;
  Packer packer(512, max_pieces_per_row(512), true, [&](std::span<const Piece> row) {
    ++rows;
    std::int64_t used = 0;
    for (const Piece& piece : row) {
      used += piece.length;
      ++seen[piece.document];
    }
    ASSERT_LE(used, 512);
    pairs += used;
  });
  const int units = 3 * static_cast<int>(Packer::kWindow) + 17;
  seen.assign(static_cast<std::size_t>(units), 0);
  std::int64_t expected = 0;
  for (int i = 0; i < units; ++i) {
    const auto length = static_cast<std::uint32_t>(
        1 + philox_bits({.seed = 5}, static_cast<std::uint64_t>(i)) % 300);
    expected += length;
    const Piece piece{static_cast<std::uint64_t>(i), 0, length, 0};
    packer.add({&piece, 1});
  }
  packer.finish();
  EXPECT_EQ(pairs, expected);
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  EXPECT_GT(static_cast<double>(pairs) / (512.0 * static_cast<double>(rows)), 0.99);
}

TEST_F(Packing, HeldOutRecordsAndTexts) {
  std::string bytes;
  for (int i = 0; i < 100; ++i) bytes += "{\"text\":\"record " + std::to_string(i) + "\"}\n";
  options.eval_fraction = 0.1;
  add_source(write("a.jsonl", bytes));
  const PreparedData data = prepare();
  EXPECT_EQ(data.eval->sources()[0].rows->counts().records, 10);
  EXPECT_EQ(data.train->sources()[0].rows->counts().records, 90);
  std::set<std::uint64_t> held;
  for (std::int64_t r = 0; r < data.eval->num_rows(); ++r) {
    for (const Piece& piece : data.eval->pieces(r)) held.insert(piece.document);
  }
  EXPECT_EQ(held.size(), 10u);
  for (std::int64_t r = 0; r < data.train->num_rows(); ++r) {
    for (const Piece& piece : data.train->pieces(r)) EXPECT_EQ(held.count(piece.document), 0u);
  }

  // One text: its end is held out, no pair is in both or in neither.
  options.train.clear();
  add_source(write("book.txt", std::string(1000, 'a') + std::string(1000, 'b')));
  const PreparedData book = prepare();
  EXPECT_EQ(book.train->sources()[0].rows->counts().target_tokens, 1800);
  EXPECT_EQ(book.eval->sources()[0].rows->counts().target_tokens, 200);
  EXPECT_EQ(text_of(all_rows(*book.eval)[0].inputs), std::string(16, 'b'));

  // A separate evaluation source takes the place of the fraction.
  options.eval.emplace_back();
  options.eval.back().path = write("eval.txt", "something else");
  const PreparedData separate = prepare();
  EXPECT_EQ(separate.train->sources()[0].rows->counts().target_tokens, 2000);
  EXPECT_EQ(separate.eval->sources()[0].rows->counts().target_tokens, 14);
}

TEST_F(Packing, WeightsAreSharesOfTheTokens) {
  options.packing = false;
  std::string many, few;
  for (int i = 0; i < 300; ++i) many += tokens_row(i, 17);
  for (int i = 0; i < 10; ++i) few += tokens_row(i, 9);
  add_source(write("many.jsonl", many));
  add_source(write("few.jsonl", few));
  options.train[1].weight = 0.25;
  const auto data = prepare().train;
  // 300 rows of 16 tokens are three quarters; the other quarter takes 200 rows of 8 tokens.
  EXPECT_EQ(data->epoch_rows_of(0), 300);
  EXPECT_EQ(data->epoch_rows_of(1), 200);
  const std::vector<std::string> lines = data->describe_epoch(8);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(
      lines[0],
      "an epoch: 500 rows of 16 in 63 steps of 8, the last one of 4, about 6400 target tokens");
  EXPECT_NE(lines[1].find("300 of its 300 rows an epoch, seen 1.00 times, 75.0%"),
            std::string::npos)
      << lines[1];
  EXPECT_NE(lines[2].find("200 of its 10 rows an epoch, seen 20.00 times, 25.0%"),
            std::string::npos)
      << lines[2];
  std::map<std::int64_t, int> times;
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    for (std::int64_t i = 0; i < data->epoch_rows(); ++i) ++times[data->row_at(7, epoch, i, true)];
  }
  for (const auto& [row, count] : times) EXPECT_EQ(count, row < 300 ? 2 : 40) << row;

  options.train[0].weight = 3;
  options.train[1].weight = 1;
  const auto both = prepare().train;
  const double tokens_many = 16.0 * static_cast<double>(both->epoch_rows_of(0));
  const double tokens_few = 8.0 * static_cast<double>(both->epoch_rows_of(1));
  EXPECT_NEAR(tokens_many / (tokens_many + tokens_few), 0.75, 0.01);

  // Weights are for training alone.
  const auto eval = prepare_sources(options.train, options, settings);
  EXPECT_EQ(eval->epoch_rows(), 310);

  options.train[0].weight = std::nullopt;
  try {
    prepare();
    FAIL() << "a weight of 1 beside an unweighted source was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("share of the tokens"), std::string::npos);
  }
}

TEST(Permutation, IsOneForEverySize) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 10, 17, 64, 1000, 4096, 65537}) {
    const Permutation order(size, derive_key(1, RandomPurpose::kShuffle, 3));
    std::vector<bool> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t at = order(i);
      ASSERT_GE(at, 0);
      ASSERT_LT(at, size);
      ASSERT_FALSE(seen[static_cast<std::size_t>(at)]);
      seen[static_cast<std::size_t>(at)] = true;
    }
  }
}

TEST(Permutation, LooksShuffled) {
  // Mean displacement of a random order of n is n / 3; neighbours are seldom neighbours again;
  // another epoch gives another order.
  const std::int64_t size = 10000;
  const Permutation first(size, derive_key(1, RandomPurpose::kShuffle, 0));
  const Permutation second(size, derive_key(1, RandomPurpose::kShuffle, 1));
  double displacement = 0;
  int same = 0, neighbours = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    displacement += std::abs(static_cast<double>(first(i) - i));
    same += first(i) == second(i) ? 1 : 0;
    if (i > 0) neighbours += std::abs(first(i) - first(i - 1)) == 1 ? 1 : 0;
  }
  EXPECT_NEAR(displacement / static_cast<double>(size), static_cast<double>(size) / 3, 100);
  EXPECT_LT(same, 10);
  EXPECT_LT(neighbours, 12);
}

TEST(Permutation, OfFiveThousandMillionThings) {
  const Permutation order(5'000'000'000, derive_key(1, RandomPurpose::kShuffle));
  std::set<std::int64_t> seen;
  bool past_32_bits = false;
  for (std::int64_t i = 4'999'990'000; i < 5'000'000'000; ++i) {
    const std::int64_t at = order(i);
    ASSERT_TRUE(at >= 0 && at < 5'000'000'000);
    ASSERT_TRUE(seen.insert(at).second);
    past_32_bits |= at > (std::int64_t{1} << 32);
  }
  EXPECT_TRUE(past_32_bits);
}

}  // namespace
}  // namespace tessera
