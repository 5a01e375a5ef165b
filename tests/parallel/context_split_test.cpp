#include "parallel/context_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/support/expect_error.h"

namespace tessera {
namespace {

TEST(ContextSplit, PiecesOfAllRanksAreTheWhole) {
  for (const int size : {1, 2, 3, 8}) {
    const ContextSplit split(6, size);
    std::vector<int> seen(static_cast<std::size_t>(split.all_tokens()));
    for (int rank = 0; rank < size; ++rank) {
      std::int64_t held = 0;
      split.for_each_piece(rank, [&](std::int64_t place, std::int64_t own, std::int64_t count) {
        EXPECT_EQ(own, held) << "pieces lie one behind the other";
        for (std::int64_t i = 0; i < count; ++i) ++seen[static_cast<std::size_t>(place + i)];
        held += count;
      });
      EXPECT_EQ(held, 6);
    }
    for (const int count : seen) EXPECT_EQ(count, 1);
  }
}

// Pairs of a query and a key in front of it, of one document as long as the micro-batch.
TEST(ContextSplit, CausalWorkIsEqual) {
  for (const int size : {2, 3, 8}) {
    const ContextSplit split(10, size);
    const auto work_of = [&](int rank) {
      std::int64_t pairs = 0;
      for (int i = 0; i < split.pieces(); ++i) {
        const TokenRange range = split.piece(rank, i);
        for (std::int64_t query = range.begin; query < range.end; ++query) pairs += query + 1;
      }
      return pairs;
    };
    for (int rank = 1; rank < size; ++rank) EXPECT_EQ(work_of(rank), work_of(0)) << size;
  }
}

TEST(ContextSplit, RefusesWhatHasNoTwoHalves) {
  test::expect_error(ErrorKind::kInternal, {"7 tokens on each of 2 ranks"},
                     [] { ContextSplit(7, 2); });
}

// Every query of a piece sees the keys that it sees in the whole micro-batch: bounds are aligned at
// a document's last key.
TEST(PieceBounds, QueriesSeeTheKeysInFrontOfThem) {
  const std::vector<std::int32_t> documents = {0, 5, 6, 6, 19, 22, 22};  // and padding up to 24
  const ContextSplit split(8, 3);
  const auto document_of = [&](std::int64_t token) {
    int d = 0;
    while (documents[static_cast<std::size_t>(d) + 1] <= token) ++d;
    return d;
  };
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 2; ++i) {
      const TokenRange piece = split.piece(rank, i);
      std::vector<std::int32_t> queries(documents.size());
      std::vector<std::int32_t> keys(documents.size());
      piece_bounds(piece, documents, queries, keys);
      EXPECT_EQ(queries.front(), 0);
      EXPECT_EQ(keys.front(), 0);
      if (piece.begin == 0) {
        EXPECT_EQ(queries, keys);
      }
      std::int64_t covered = 0;
      for (std::size_t d = 0; d + 1 < documents.size(); ++d) {
        ASSERT_LE(queries[d], queries[d + 1]);
        ASSERT_LE(keys[d], keys[d + 1]);
        EXPECT_EQ(keys[d + 1] > keys[d] ? keys[d] : documents[d], documents[d]);
        for (std::int32_t q = queries[d]; q < queries[d + 1]; ++q) {
          const std::int64_t token = piece.begin + q;
          EXPECT_EQ(document_of(token), static_cast<int>(d));
          EXPECT_EQ(keys[d + 1] - (queries[d + 1] - q) + 1, token + 1) << "its last key is its own";
          ++covered;
        }
      }
      EXPECT_EQ(covered,
                std::max<std::int64_t>(0, std::min<std::int64_t>(piece.end, 22) - piece.begin));
    }
  }
}

}  // namespace
}  // namespace tessera
