// Context parallelism: how n ranks share the tokens of a micro-batch. They are cut into 2 n equal
// pieces; rank r holds pieces r and 2 n - 1 - r, an early and a late one, so that causal attention
// is the same work for all ("zig-zag"). Pure functions, shared by the host's batches and attention.
#pragma once

#include <cstdint>
#include <span>

namespace tessera {

// Tokens [begin, end) of a micro-batch.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

class ContextSplit {
 public:
  static constexpr int kPieces = 2;

  // `tokens` of each of `size` ranks, even where there are several. A group of one holds the whole
  // as one piece.
  ContextSplit(std::int64_t tokens, int size);

  int size() const { return size_; }
  int pieces() const { return size_ == 1 ? 1 : kPieces; }
  // Of one rank, and of all of them.
  std::int64_t tokens() const { return tokens_; }
  std::int64_t all_tokens() const { return tokens_ * size_; }
  // What the i-th piece of `rank` is of the micro-batch; it is also the i-th of that rank's memory.
  TokenRange piece(int rank, int i) const;
  // Calls body(place in the micro-batch, place in the rank's memory, tokens) for each of its
  // pieces.
  template <typename Body>
  void for_each_piece(int rank, Body&& body) const {
    for (int i = 0; i < pieces(); ++i) {
      const TokenRange range = piece(rank, i);
      body(range.begin, i * range.count(), range.count());
    }
  }

 private:
  std::int64_t tokens_;
  int size_;
};

// Bounds for attention from those of a micro-batch's documents (cumulative, from 0): the queries of
// `piece`, and the keys in front of its end, which stand before and in it. A document's queries are
// the last ones of its keys that are there; one in front of the piece has keys alone, one behind it
// nothing. With a piece from 0 on both are the same.
void piece_bounds(const TokenRange& piece, std::span<const std::int32_t> documents,
                  std::span<std::int32_t> queries, std::span<std::int32_t> keys);

}  // namespace tessera
