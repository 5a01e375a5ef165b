#include "parallel/context_split.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {

ContextSplit::ContextSplit(std::int64_t tokens, int size) : tokens_(tokens), size_(size) {
  CHECK(size >= 1 && tokens >= 0 && (size == 1 || tokens % kPieces == 0),
        "[context] {} tokens on each of {} ranks, expected a multiple of {}", tokens, size,
        kPieces);
}

TokenRange ContextSplit::piece(int rank, int i) const {
  CHECK(rank >= 0 && rank < size_ && i >= 0 && i < pieces(),
        "[context] piece {} of rank {}, there are {} of each of {} ranks", i, rank, pieces(),
        size_);
  if (size_ == 1) return {0, tokens_};
  const std::int64_t count = tokens_ / kPieces;
  const std::int64_t number = i == 0 ? rank : 2 * size_ - 1 - rank;
  return {number * count, (number + 1) * count};
}

void piece_bounds(const TokenRange& piece, std::span<const std::int32_t> documents,
                  std::span<std::int32_t> queries, std::span<std::int32_t> keys) {
  CHECK(queries.size() == documents.size() && keys.size() == documents.size(),
        "[context] {} bounds of documents into {} and {}", documents.size(), queries.size(),
        keys.size());
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const std::int64_t bound = documents[d];
    queries[d] = static_cast<std::int32_t>(std::clamp(bound, piece.begin, piece.end) - piece.begin);
    keys[d] = static_cast<std::int32_t>(std::min(bound, piece.end));
  }
}

}  // namespace tessera
