// The order of rows: equal for every number of ranks, over epochs and after resumes (kinds B04,
// B24, B26, B28), and the form of a micro-batch (B87, B88).
#include "data/loader.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

using test::DataTest;
using Ids = std::vector<std::int32_t>;

class Loader : public DataTest {
 protected:
  // `count` rows of one document each; row i begins with token i.
  std::shared_ptr<const Dataset> rows(int count) {
    options.packing = false;
    std::string bytes;
    for (int i = 0; i < count; ++i) {
      bytes += "{\"input_ids\":[" + std::to_string(i) + ",1,2,3]}\n";
    }
    return prepare_file("rows-" + std::to_string(count) + ".jsonl", bytes);
  }

  // Row ids of the steps [begin, end) as the ranks see them, joined in the order of the step.
  static std::vector<std::int64_t> seen(const std::shared_ptr<const Dataset>& data, int dp,
                                        std::int64_t micro_batch_size, std::int64_t accumulation,
                                        std::int64_t begin, std::int64_t end) {
    std::vector<std::unique_ptr<DataLoader>> loaders;
    for (int rank = 0; rank < dp; ++rank) {
      loaders.push_back(std::make_unique<DataLoader>(
          data, LoaderSettings{micro_batch_size, accumulation, rank, dp, 11}));
    }
    std::vector<std::int64_t> ids;
    for (std::int64_t step = begin; step < end; ++step) {
      for (std::int64_t micro_batch = 0; micro_batch < accumulation; ++micro_batch) {
        for (auto& loader : loaders) {
          for (const std::int64_t id : loader->load(step, micro_batch).row_ids) {
            if (id >= 0) ids.push_back(id);
          }
        }
      }
    }
    return ids;
  }
};

TEST_F(Loader, ThreeEpochsAreOneSequenceForEveryLayout) {
  for (const int count : {1, 3, 7, 10, 64}) {
    const auto data = rows(count);
    const std::int64_t steps = 3 * ((count + 7) / 8);
    const auto one = seen(data, 1, 1, 8, 0, steps);
    ASSERT_EQ(one.size(), static_cast<std::size_t>(3 * count));
    EXPECT_EQ(seen(data, 2, 2, 2, 0, steps), one);
    EXPECT_EQ(seen(data, 4, 1, 2, 0, steps), one);
    EXPECT_EQ(seen(data, 4, 2, 1, 0, steps), one);
    EXPECT_EQ(seen(data, 1, 8, 1, 0, steps), one);
    for (int epoch = 0; epoch < 3; ++epoch) {
      const std::set<std::int64_t> rows_of_epoch(one.begin() + epoch * count,
                                                 one.begin() + (epoch + 1) * count);
      EXPECT_EQ(rows_of_epoch.size(), static_cast<std::size_t>(count));
    }
    if (count == 64) {
      EXPECT_NE(std::vector(one.begin(), one.begin() + count),
                std::vector(one.begin() + count, one.begin() + 2 * count));
    }
  }
}

TEST_F(Loader, AResumeAnywhereContinuesTheSequence) {
  const auto data = rows(10);
  const auto whole = seen(data, 1, 1, 1, 0, 30);
  for (const std::int64_t stop : {1, 9, 10, 14, 20, 29}) {
    auto joined = seen(data, 1, 1, 1, 0, stop);
    const auto rest = seen(data, 1, 1, 1, stop, 30);
    joined.insert(joined.end(), rest.begin(), rest.end());
    EXPECT_EQ(joined, whole) << stop;
  }
  // Accumulation 4 on two ranks, stopped at step 5, continued on four.
  const auto many = rows(100);
  const auto all = seen(many, 2, 1, 4, 0, 30);
  auto joined = seen(many, 2, 1, 4, 0, 5);
  const auto rest = seen(many, 4, 1, 2, 5, 30);
  joined.insert(joined.end(), rest.begin(), rest.end());
  EXPECT_EQ(joined, all);
}

TEST_F(Loader, TheLastStepOfAnEpochIsSmaller) {
  const auto seven = rows(7);
  DataLoader loader(seven, {1, 4, 0, 1, 3});
  EXPECT_EQ(loader.steps_per_epoch(), 2);
  EXPECT_EQ(loader.used_micro_batches(0), 4);
  EXPECT_EQ(loader.used_micro_batches(1), 3);
  EXPECT_EQ(loader.used_micro_batches(2), 4);
  EXPECT_EQ(loader.epoch_of(1), 0);
  EXPECT_EQ(loader.epoch_of(2), 1);
  EXPECT_DOUBLE_EQ(loader.epochs_after(1), 4.0 / 7);
  EXPECT_DOUBLE_EQ(loader.epochs_after(4), 2.0);
  const MicroBatch last = loader.load(1, 3);
  EXPECT_EQ(last.target_tokens, 0);
  EXPECT_EQ(last.row_ids, std::vector<std::int64_t>({-1}));
  EXPECT_TRUE(
      std::all_of(last.documents.begin(), last.documents.end(), [](int d) { return d == 0; }));
  EXPECT_EQ(last.order.size(), 16u);

  DataLoader three(rows(3), {1, 4, 0, 1, 3});
  EXPECT_EQ(three.steps_per_epoch(), 1);
  EXPECT_EQ(three.used_micro_batches(0), 3);
}

TEST_F(Loader, ThirteenRowsOverFourRanksEndTogether) {
  const auto data = rows(13);
  std::vector<std::int64_t> batches;
  std::int64_t targets = 0;
  for (int rank = 0; rank < 4; ++rank) {
    DataLoader loader(data, {1, 1, rank, 4, 3});
    batches.push_back(loader.steps_per_epoch());
    for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
      EXPECT_EQ(loader.used_micro_batches(step), 1);
      targets += loader.load(step, 0).target_tokens;
    }
  }
  EXPECT_EQ(batches, std::vector<std::int64_t>({4, 4, 4, 4}));
  EXPECT_EQ(targets, 13 * 3);
}

TEST_F(Loader, EvaluationTakesEveryRowOnceInOrder) {
  const auto data = rows(5);
  DataLoader loader(data, {.micro_batch_size = 2, .shuffle = false});
  EXPECT_EQ(loader.steps_per_epoch(), 3);
  std::vector<std::int64_t> ids;
  for (std::int64_t step = 0; step < 3; ++step) {
    for (const std::int64_t id : loader.load(step, 0).row_ids) ids.push_back(id);
  }
  EXPECT_EQ(ids, std::vector<std::int64_t>({0, 1, 2, 3, 4, -1}));
}

TEST_F(Loader, DocumentsPaddingAndOrderOfAMicroBatch) {
  settings.sequence_length = 8;
  // Row 0: documents of 3 and 2 pairs; row 1 full; row 2: 4 pairs.
  options.packing = false;
  const auto data =
      prepare_file("a.jsonl",
                   "{\"input_ids\":[9,8,7,6,5,4,3],\"position_ids\":[0,1,2,3,0,1,2]}\n"
                   "{\"input_ids\":[1,2,3,4,5,6,7,8,9]}\n{\"input_ids\":[2,2,2,2,2]}\n");
  DataLoader loader(data, {.micro_batch_size = 3, .shuffle = false, .vocab_size = 257});
  EXPECT_EQ(loader.max_documents(), 3 * (2 + 1));
  const MicroBatch batch = loader.load(0, 0);
  EXPECT_EQ(batch.documents, Ids({0, 3, 5, 8, 16, 20, 20, 20, 20, 20}));
  EXPECT_EQ(batch.inputs,
            Ids({9, 8, 7, 5, 4, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2, 2, 0, 0, 0, 0}));
  EXPECT_EQ(batch.targets, Ids({8, 7, 6, 4, 3, -100, -100, -100, 2,    3,    4,    5,
                                6, 7, 8, 9, 2, 2,    2,    2,    -100, -100, -100, -100}));
  EXPECT_EQ(batch.positions,
            Ids({0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(batch.target_tokens, 5 + 8 + 4);
  for (std::size_t i = 1; i < batch.order.size(); ++i) {
    const auto a = batch.order[i - 1];
    const auto b = batch.order[i];
    EXPECT_TRUE(batch.inputs[a] < batch.inputs[b] || (batch.inputs[a] == batch.inputs[b] && a < b));
  }
  Ids sorted = batch.order;
  std::sort(sorted.begin(), sorted.end());
  Ids places(24);
  std::iota(places.begin(), places.end(), 0);
  EXPECT_EQ(sorted, places);
}

TEST_F(Loader, PrefetchGivesTheSameAsMaking) {
  const auto data = rows(23);
  DataLoader ahead(data,
                   {.micro_batch_size = 2, .gradient_accumulation = 3, .seed = 5, .prefetch = 3});
  DataLoader plain(data,
                   {.micro_batch_size = 2, .gradient_accumulation = 3, .seed = 5, .prefetch = 0});
  // In order, with jumps back and forward, and a repeated request.
  std::vector<std::pair<int, int>> requests;
  for (int step = 0; step < 5; ++step) {
    for (int m = 0; m < 3; ++m) requests.push_back({step, m});
  }
  requests.insert(requests.end(),
                  {{2, 1}, {2, 2}, {3, 0}, {9, 2}, {10, 0}, {0, 0}, {0, 0}, {0, 2}});
  for (const auto& [step, m] : requests) {
    const MicroBatch a = ahead.load(step, m);
    const MicroBatch b = plain.load(step, m);
    ASSERT_EQ(a.row_ids, b.row_ids) << step << " " << m;
    ASSERT_EQ(a.inputs, b.inputs);
    ASSERT_EQ(a.targets, b.targets);
    ASSERT_EQ(a.documents, b.documents);
  }
}

TEST_F(Loader, AnErrorAheadReachesTheCallerAndOnlyForItsBatch) {
  const auto data = rows(20);  // row i begins with token i
  DataLoader loader(data, {.shuffle = false, .vocab_size = 10});
  for (int step = 0; step < 10; ++step) EXPECT_EQ(loader.load(step, 0).inputs[0], step);
  for (int again = 0; again < 2; ++again) {
    try {
      loader.load(10, 0);
      FAIL() << "id 10 of a vocabulary of 10 was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("token id 10 is outside"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("record 10 tokens 0-2"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(loader.load(3, 0).inputs[0], 3);
}

TEST_F(Loader, ProvenanceOfAStep) {
  const auto data = rows(6);
  DataLoader loader(data, {.micro_batch_size = 2, .seed = 1});
  const auto lines = loader.describe_step(1);
  const auto ids = loader.rows_of_step(1);
  ASSERT_EQ(lines.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NE(lines[i].find("rows-6.jsonl record " + std::to_string(ids[i]) + " tokens 0-2"),
              std::string::npos);
  }
}

TEST_F(Loader, AnotherSeedIsAnotherOrder) {
  const auto data = rows(50);
  DataLoader a(data, {.micro_batch_size = 50, .seed = 1});
  DataLoader b(data, {.micro_batch_size = 50, .seed = 2});
  EXPECT_NE(a.rows_of_step(0), b.rows_of_step(0));
}

}  // namespace
}  // namespace tessera
