// Byte-pair encoding: the merges of a tokenizer.json applied to one word at a time, lowest rank
// first, leftmost first among equals.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer/vocabulary.h"
#include "data/tokenizer/word_cache.h"

namespace tessera {

struct BpeConfig {
  std::vector<std::pair<std::string, std::int32_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;  // in order of rank
  std::optional<std::string> unk_token;
  std::string continuing_subword_prefix;
  std::string end_of_word_suffix;
  bool fuse_unk = false;
  bool byte_fallback = false;
  bool ignore_merges = false;
};

class BpeModel {
 public:
  class Scratch {
   private:
    friend class BpeModel;
    struct Symbol {
      std::int32_t id;
      std::uint32_t begin;  // bytes of the word it stands for
      std::uint32_t end;
    };
    WordCache cache;
    std::vector<Symbol> symbols;
    std::vector<std::uint32_t> ranks;
    std::vector<std::uint32_t> previous;
    std::vector<std::uint32_t> next;
    std::vector<std::uint64_t> queue;
    std::vector<std::int32_t> ids;
  };

  // `file` is named in errors.
  BpeModel(BpeConfig config, std::string_view file);

  // True if every byte has a token in GPT-2's alphabet, so that words can be encoded as bytes.
  bool can_encode_bytes() const { return has_all_bytes_; }
  // From here on words are raw bytes and tokens are spelled in GPT-2's alphabet.
  void encode_bytes();

  // Appends the tokens of `word`. Without encode_bytes() it must be valid UTF-8.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& ids) const;

  // The same, and for each token the bytes [begin, end) of `word` it stands for.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& ids,
              std::vector<std::pair<std::uint32_t, std::uint32_t>>& spans) const;

  const Vocabulary& vocabulary() const { return vocabulary_; }

 private:
  static constexpr std::uint32_t kNoRank = 0xFFFFFFFF;
  struct Pair {
    std::uint64_t key;
    std::uint32_t rank;
    std::int32_t merged;
  };

  void build_merges(const BpeConfig& config, std::string_view file);
  void build_characters();
  void build_cuts(const BpeConfig& config);
  const Pair* find_pair(std::int32_t left, std::int32_t right) const;
  std::int32_t character(char32_t c) const;
  bool may_cut(char32_t before, char32_t after) const;
  template <typename Sink>
  void for_each_segment(std::string_view word, Sink&& sink) const;

  // Each leaves the tokens of the word in scratch.symbols.
  void tokenize(std::string_view word, Scratch& scratch) const;
  void start_from_bytes(std::string_view word, Scratch& scratch) const;
  void start_from_characters(std::string_view word, Scratch& scratch) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  Vocabulary vocabulary_;
  Vocabulary words_;                    // byte mode: raw bytes of each token
  std::vector<std::uint32_t> lengths_;  // bytes of input a token stands for; 0: not fixed
  std::vector<Pair> pairs_;             // open addressing, a power of two
  std::vector<std::int32_t> merged_by_rank_;
  std::vector<std::uint32_t> byte_pair_ranks_;  // byte mode: rank of [first byte][second byte]
  std::array<std::int32_t, 256> byte_ids_;      // of a byte's character in GPT-2's alphabet
  std::array<std::int32_t, 256> fallback_ids_;  // of <0xNN>
  std::vector<std::int32_t> character_pages_;   // id of a code point's own token, or -1
  std::vector<std::uint16_t> character_index_;
  std::vector<std::uint64_t> joins_;  // bit set: code points that a merge joins
  std::int32_t unk_id_ = -1;
  std::string prefix_;
  std::string suffix_;
  bool has_unk_ = false;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
  bool has_all_bytes_ = false;
  bool has_all_fallbacks_ = false;
  bool encodes_bytes_ = false;
  bool cuts_ = false;  // words may be cut where no merge can join
};

}  // namespace tessera
