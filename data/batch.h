// MicroBatch: the one form in which every kind of data reaches the model. `rows` rows of
// `sequence_length` tokens stand one behind the other; documents are described by cumulative
// lengths.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

inline constexpr std::int32_t kIgnoredTarget = -100;

struct MicroBatch {
  std::int64_t rows = 0;
  std::int64_t sequence_length = 0;

  // All [rows * sequence_length]. targets[t] is the token to be predicted from inputs[t] (no
  // further shift), kIgnoredTarget where nothing is trained. positions restart at 0 with every
  // document. Padding has input 0 and an ignored target: it is known by its place, never by a token
  // id.
  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;
  // The places 0..T-1 sorted by (inputs, place), as EmbeddingBackward takes them.
  std::vector<std::int32_t> order;

  // Cumulative lengths [max_documents + 1], from 0; the unused tail repeats the last bound. A
  // document never crosses a row. Padding between two rows is a document of its own, since only
  // what lies past the last bound may belong to none; padding behind the last real token is past
  // the last bound.
  std::vector<std::int32_t> documents;

  std::int64_t target_tokens = 0;  // targets that are not ignored

  // Where the rows come from: numbers in the packed index (PackedRows), -1 for an empty row.
  std::vector<std::int64_t> row_ids;  // [rows]

  std::int64_t tokens() const { return rows * sequence_length; }
};

// Fills `order` from `inputs`.
void sort_tokens(std::span<const std::int32_t> inputs, std::vector<std::int32_t>& order);

}  // namespace tessera
