#include "data/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/utf8.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// Below this many symbols a scan for the best pair beats a queue.
constexpr std::size_t kScanLimit = 96;

// Bits of the table of joinable code points; a collision only means one cut less.
constexpr std::size_t kJoinBits = std::size_t{1} << 18;

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

std::size_t pair_slot(std::uint64_t key, std::size_t size) {
  const std::uint64_t hash = key * 0x9E3779B97F4A7C15ull;
  return (hash ^ hash >> 29 ^ hash >> 47) & (size - 1);
}

std::size_t join_bit(char32_t before, char32_t after) {
  const std::uint64_t key = static_cast<std::uint64_t>(before) << 32 | after;
  return (key * 0x9E3779B97F4A7C15ull) >> (64 - 18);
}

char32_t first_character(std::string_view text) { return utf8::decode(text.data()).code_point; }
char32_t last_character(std::string_view text) {
  return utf8::decode(text.data() + utf8::previous(text, text.size())).code_point;
}

// The byte of a token of the form <0xNN>, or -1.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(c >= 'A' && c <= 'F')) return -1;
    value = value * 16 + (is_digit ? c - '0' : c - 'A' + 10);
  }
  return value;
}

}  // namespace

BpeModel::BpeModel(BpeConfig config, std::string_view file)
    : prefix_(config.continuing_subword_prefix),
      suffix_(config.end_of_word_suffix),
      fuse_unk_(config.fuse_unk),
      byte_fallback_(config.byte_fallback),
      ignore_merges_(config.ignore_merges) {
  std::size_t bytes = 0;
  for (const auto& [text, id] : config.vocabulary) bytes += text.size();
  vocabulary_.reserve(config.vocabulary.size(), bytes);
  for (const auto& [text, id] : config.vocabulary) {
    CHECK_USER(id >= 0, "[tokenizer] {}: token \"{}\" has the id {}; ids start at 0", file, text,
               id);
    CHECK_USER(!vocabulary_.text_of(id),
               "[tokenizer] {}: tokens \"{}\" and \"{}\" both have the id {}", file,
               *vocabulary_.text_of(id), text, id);
    vocabulary_.add(text, id);
  }
  byte_ids_.fill(-1);
  fallback_ids_.fill(-1);
  for (const auto& [text, id] : config.vocabulary) {
    if (const int byte = fallback_byte(text); byte >= 0)
      fallback_ids_[static_cast<std::size_t>(byte)] = id;
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    byte_ids_[byte] =
        vocabulary_.id_of(ByteAlphabet::instance().text(static_cast<unsigned char>(byte)));
  }
  const auto is_known = [](std::int32_t id) { return id >= 0; };
  has_all_fallbacks_ = std::all_of(fallback_ids_.begin(), fallback_ids_.end(), is_known);
  has_all_bytes_ = prefix_.empty() && suffix_.empty() &&
                   std::all_of(byte_ids_.begin(), byte_ids_.end(), is_known);
  if (config.unk_token) {
    has_unk_ = true;
    unk_id_ = vocabulary_.id_of(*config.unk_token);
  }
  lengths_.assign(static_cast<std::size_t>(vocabulary_.largest_id() + 1), 0);
  for (const auto& [text, id] : config.vocabulary) {
    const bool is_fixed = id != unk_id_ && fallback_byte(text) < 0;
    if (is_fixed) lengths_[static_cast<std::size_t>(id)] = static_cast<std::uint32_t>(text.size());
  }
  build_merges(config, file);
  build_characters();
  build_cuts(config);
}

void BpeModel::build_merges(const BpeConfig& config, std::string_view file) {
  std::size_t size = 64;
  while (size < 2 * config.merges.size()) size *= 2;
  pairs_.assign(size, {std::numeric_limits<std::uint64_t>::max(), kNoRank, -1});
  merged_by_rank_.reserve(config.merges.size());
  const auto require = [&](std::string_view token, std::size_t rank) {
    const std::int32_t id = vocabulary_.id_of(token);
    CHECK_USER(id >= 0,
               "[tokenizer] {}: merge {} makes or uses \"{}\", which is not in the vocabulary",
               file, rank, token);
    return id;
  };
  std::string joined;
  for (std::size_t rank = 0; rank < config.merges.size(); ++rank) {
    const auto& [left, right] = config.merges[rank];
    const std::int32_t left_id = require(left, rank);
    const std::int32_t right_id = require(right, rank);
    joined = left;
    joined += std::string_view(right).substr(std::min(prefix_.size(), right.size()));
    const std::int32_t merged = require(joined, rank);
    merged_by_rank_.push_back(merged);
    const std::uint64_t key = pair_key(left_id, right_id);
    std::size_t at = pair_slot(key, size);
    while (pairs_[at].rank != kNoRank && pairs_[at].key != key) at = (at + 1) & (size - 1);
    pairs_[at] = {key, static_cast<std::uint32_t>(rank), merged};  // of repeats the last one holds
  }
}

void BpeModel::build_characters() {
  character_index_.assign(0x1100, 0);
  character_pages_.assign(256, -1);  // page 0 of the table is the empty page
  for (std::int32_t id = 0; id <= vocabulary_.largest_id(); ++id) {
    const auto text = vocabulary_.text_of(id);
    if (!text || text->empty() || utf8::sequence_length((*text)[0]) != text->size()) continue;
    if (vocabulary_.id_of(*text) != id) continue;
    const char32_t c = first_character(*text);
    std::uint16_t& page = character_index_[c >> 8];
    if (page == 0) {
      page = static_cast<std::uint16_t>(character_pages_.size() / 256);
      character_pages_.resize(character_pages_.size() + 256, -1);
    }
    character_pages_[static_cast<std::size_t>(page) * 256 + (c & 0xFF)] = id;
  }
}

// A word can be cut between two of its code points if no merge has a left part that ends in the one
// and a right part that begins with the other: the parts then never influence each other. It makes
// words of the texts that SentencePiece-style files hand over whole.
void BpeModel::build_cuts(const BpeConfig& config) {
  cuts_ = prefix_.empty() && suffix_.empty() && (!byte_fallback_ || has_all_fallbacks_);
  joins_.assign(kJoinBits / 64, 0);
  for (const auto& [left, right] : config.merges) {
    // Tokens that do not spell what they stand for break the rule above.
    const auto is_indirect = [&](const std::string& token) {
      return token.empty() || fallback_byte(token) >= 0 || vocabulary_.id_of(token) == unk_id_;
    };
    if (is_indirect(left) || is_indirect(right)) {
      cuts_ = false;
      return;
    }
    const std::size_t bit = join_bit(last_character(left), first_character(right));
    joins_[bit / 64] |= std::uint64_t{1} << (bit % 64);
  }
}

void BpeModel::encode_bytes() {
  CHECK(has_all_bytes_, "[tokenizer] encode_bytes without a token for each byte");
  encodes_bytes_ = true;
  cuts_ = false;  // pre-tokenizers of byte-level files make the words
  byte_pair_ranks_.assign(256 * 256, kNoRank);
  for (std::size_t left = 0; left < 256; ++left) {
    for (std::size_t right = 0; right < 256; ++right) {
      if (const Pair* pair = find_pair(byte_ids_[left], byte_ids_[right])) {
        byte_pair_ranks_[left * 256 + right] = pair->rank;
      }
    }
  }
  std::fill(lengths_.begin(), lengths_.end(), 0);
  if (ignore_merges_) words_.reserve(vocabulary_.num_tokens(), vocabulary_.num_tokens() * 8);
  for (std::int32_t id = 0; id <= vocabulary_.largest_id(); ++id) {
    const auto text = vocabulary_.text_of(id);
    if (!text) continue;
    const auto bytes = ByteAlphabet::instance().bytes_of(*text);
    if (!bytes) continue;
    lengths_[static_cast<std::size_t>(id)] = static_cast<std::uint32_t>(bytes->size());
    if (ignore_merges_) words_.add(*bytes, id);
  }
}

const BpeModel::Pair* BpeModel::find_pair(std::int32_t left, std::int32_t right) const {
  const std::uint64_t key = pair_key(left, right);
  for (std::size_t at = pair_slot(key, pairs_.size());; at = (at + 1) & (pairs_.size() - 1)) {
    if (pairs_[at].key == key) return &pairs_[at];
    if (pairs_[at].rank == kNoRank) return nullptr;
  }
}

std::int32_t BpeModel::character(char32_t c) const {
  return character_pages_[static_cast<std::size_t>(character_index_[c >> 8]) * 256 + (c & 0xFF)];
}

bool BpeModel::may_cut(char32_t before, char32_t after) const {
  const std::size_t bit = join_bit(before, after);
  if ((joins_[bit / 64] >> (bit % 64) & 1) != 0) return false;
  if (byte_fallback_) return true;
  // Without <unk> an unknown character vanishes and its neighbours meet; with it, unknown ones side
  // by side may be fused.
  const bool before_known = character(before) >= 0;
  const bool after_known = character(after) >= 0;
  if (!has_unk_) return before_known && after_known;
  return !fuse_unk_ || before_known || after_known;
}

template <typename Sink>
void BpeModel::for_each_segment(std::string_view word, Sink&& sink) const {
  if (!cuts_ || word.size() < 2) return sink(std::size_t{0}, word.size());
  std::size_t begin = 0;
  char32_t before = 0;
  for (std::size_t i = 0; i < word.size();) {
    if (static_cast<unsigned char>(word[i]) < 0x80) {
      // Within plain words nearly every pair of letters joins: do not ask.
      before = static_cast<unsigned char>(word[i]);
      ++i;
      continue;
    }
    const utf8::Decoded c = utf8::decode(word.data() + i);
    if (i > begin && may_cut(before, c.code_point)) {
      sink(begin, i);
      begin = i;
    }
    before = c.code_point;
    i += c.length;
  }
  sink(begin, word.size());
}

void BpeModel::encode(std::string_view word, Scratch& scratch,
                      std::vector<std::int32_t>& ids) const {
  if (word.empty()) return;
  if (cuts_ && ignore_merges_) {
    if (const std::int32_t id = vocabulary_.id_of(word); id >= 0) return ids.push_back(id);
  }
  for_each_segment(word, [&](std::size_t begin, std::size_t end) {
    const std::string_view segment = word.substr(begin, end - begin);
    WordCache::Place place;
    if (segment.size() <= WordCache::kMaxWord) {
      const auto known = scratch.cache.find(segment, &place);
      if (!known.empty()) {
        ids.insert(ids.end(), known.begin(), known.end());
        return;
      }
    }
    tokenize(segment, scratch);
    const std::size_t first = ids.size();
    for (const Scratch::Symbol& symbol : scratch.symbols) ids.push_back(symbol.id);
    if (segment.size() <= WordCache::kMaxWord && first < ids.size()) {
      scratch.cache.insert(segment, place, std::span(ids).subspan(first));
    }
  });
}

void BpeModel::encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& ids,
                      std::vector<std::pair<std::uint32_t, std::uint32_t>>& spans) const {
  const std::size_t first = ids.size();
  encode(word, scratch, ids);
  // Where each token spells a known number of bytes the spans follow from the ids.
  std::size_t begin = 0;
  const std::size_t first_span = spans.size();
  bool is_fixed = true;
  for (std::size_t i = first; i < ids.size() && is_fixed; ++i) {
    const std::uint32_t length = lengths_[static_cast<std::size_t>(ids[i])];
    is_fixed = length > 0;
    spans.emplace_back(static_cast<std::uint32_t>(begin),
                       static_cast<std::uint32_t>(begin + length));
    begin += length;
  }
  if (is_fixed && begin == word.size()) return;
  spans.resize(first_span);
  if (cuts_ && ignore_merges_ && ids.size() == first + 1 && vocabulary_.id_of(word) == ids[first]) {
    spans.emplace_back(0, static_cast<std::uint32_t>(word.size()));
    return;
  }
  for_each_segment(word, [&](std::size_t from, std::size_t to) {
    tokenize(word.substr(from, to - from), scratch);
    for (const Scratch::Symbol& symbol : scratch.symbols) {
      spans.emplace_back(static_cast<std::uint32_t>(from) + symbol.begin,
                         static_cast<std::uint32_t>(from) + symbol.end);
    }
  });
}

void BpeModel::tokenize(std::string_view word, Scratch& scratch) const {
  scratch.symbols.clear();
  if (ignore_merges_) {
    const std::int32_t id = (encodes_bytes_ ? words_ : vocabulary_).id_of(word);
    if (id >= 0) {
      scratch.symbols.push_back({id, 0, static_cast<std::uint32_t>(word.size())});
      return;
    }
  }
  if (encodes_bytes_) {
    start_from_bytes(word, scratch);
  } else {
    start_from_characters(word, scratch);
  }
  if (scratch.symbols.size() < 2) return;
  if (scratch.symbols.size() <= kScanLimit) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
}

void BpeModel::start_from_bytes(std::string_view word, Scratch& scratch) const {
  scratch.ranks.resize(word.size());
  for (std::size_t i = 0; i < word.size(); ++i) {
    const auto byte = static_cast<unsigned char>(word[i]);
    const auto at = static_cast<std::uint32_t>(i);
    scratch.symbols.push_back({byte_ids_[byte], at, at + 1});
    scratch.ranks[i] =
        i + 1 < word.size()
            ? byte_pair_ranks_[byte * std::size_t{256} + static_cast<unsigned char>(word[i + 1])]
            : kNoRank;
  }
}

void BpeModel::start_from_characters(std::string_view word, Scratch& scratch) const {
  // An unknown character waits here: with fuse_unk the next one may join it. Byte tokens do not
  // release it, which puts it behind them; so does the reference library.
  std::int32_t waiting = -1;
  std::uint32_t waiting_begin = 0;
  std::uint32_t waiting_end = 0;
  const auto release = [&] {
    if (waiting >= 0) scratch.symbols.push_back({waiting, waiting_begin, waiting_end});
    waiting = -1;
  };
  std::string spelled;
  for (std::size_t i = 0; i < word.size();) {
    const utf8::Decoded c = utf8::decode(word.data() + i);
    const auto begin = static_cast<std::uint32_t>(i);
    i += c.length;
    const auto end = static_cast<std::uint32_t>(i);
    std::string_view text = word.substr(begin, c.length);
    std::int32_t id;
    if (prefix_.empty() && suffix_.empty()) {
      id = character(c.code_point);
    } else {
      spelled.assign(begin == 0 ? "" : prefix_);
      spelled += text;
      if (i == word.size()) spelled += suffix_;
      text = spelled;
      id = vocabulary_.id_of(text);
    }
    if (id >= 0) {
      release();
      scratch.symbols.push_back({id, begin, end});
      continue;
    }
    if (byte_fallback_ && std::all_of(text.begin(), text.end(), [this](char byte) {
          return fallback_ids_[static_cast<unsigned char>(byte)] >= 0;
        })) {
      for (const char byte : text) {
        scratch.symbols.push_back({fallback_ids_[static_cast<unsigned char>(byte)], begin, end});
      }
      continue;
    }
    if (!has_unk_) continue;  // a character without a token and without <unk> leaves nothing
    CHECK_USER(unk_id_ >= 0, "[tokenizer] the file's unk_token is not in its vocabulary");
    if (waiting >= 0 && fuse_unk_) {
      waiting_end = end;
      continue;
    }
    release();
    waiting = unk_id_;
    waiting_begin = begin;
    waiting_end = end;
  }
  release();
  scratch.ranks.resize(scratch.symbols.size());
  for (std::size_t i = 0; i < scratch.symbols.size(); ++i) {
    const Pair* pair = i + 1 < scratch.symbols.size()
                           ? find_pair(scratch.symbols[i].id, scratch.symbols[i + 1].id)
                           : nullptr;
    scratch.ranks[i] = pair != nullptr ? pair->rank : kNoRank;
  }
}

void BpeModel::merge_short(Scratch& scratch) const {
  Scratch::Symbol* symbols = scratch.symbols.data();
  std::uint32_t* ranks = scratch.ranks.data();  // of the pair that starts at each symbol
  std::size_t size = scratch.symbols.size();
  const auto rank_at = [&](std::size_t i) {
    if (i + 1 >= size) return kNoRank;
    const Pair* pair = find_pair(symbols[i].id, symbols[i + 1].id);
    return pair != nullptr ? pair->rank : kNoRank;
  };
  while (size > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < size; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    symbols[best].id = merged_by_rank_[ranks[best]];
    symbols[best].end = symbols[best + 1].end;
    std::copy(symbols + best + 2, symbols + size, symbols + best + 1);
    std::copy(ranks + best + 2, ranks + size, ranks + best + 1);
    --size;
    ranks[best] = rank_at(best);
    if (best > 0) ranks[best - 1] = rank_at(best - 1);
  }
  scratch.symbols.resize(size);
}

void BpeModel::merge_long(Scratch& scratch) const {
  constexpr std::uint32_t kNone = 0xFFFFFFFF;
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  std::vector<std::uint32_t>& ranks = scratch.ranks;
  std::vector<std::uint32_t>& previous = scratch.previous;
  std::vector<std::uint32_t>& next = scratch.next;
  std::vector<std::uint64_t>& queue = scratch.queue;  // rank << 32 | position, least first
  const auto size = static_cast<std::uint32_t>(symbols.size());
  previous.resize(size);
  next.resize(size);
  queue.clear();
  for (std::uint32_t i = 0; i < size; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 == size ? kNone : i + 1;
    if (ranks[i] != kNoRank) queue.push_back(static_cast<std::uint64_t>(ranks[i]) << 32 | i);
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto renew = [&](std::uint32_t at) {
    const Pair* pair =
        next[at] == kNone ? nullptr : find_pair(symbols[at].id, symbols[next[at]].id);
    ranks[at] = pair != nullptr ? pair->rank : kNoRank;
    if (pair == nullptr) return;
    queue.push_back(static_cast<std::uint64_t>(pair->rank) << 32 | at);
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };
  while (!queue.empty()) {
    const std::uint64_t least = queue.front();
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    queue.pop_back();
    const auto at = static_cast<std::uint32_t>(least & 0xFFFFFFFF);
    // Entries of pairs that no longer stand are passed over.
    if (ranks[at] != least >> 32) continue;
    const std::uint32_t right = next[at];
    symbols[at].id = merged_by_rank_[ranks[at]];
    symbols[at].end = symbols[right].end;
    symbols[right].id = -1;
    ranks[right] = kNoRank;
    next[at] = next[right];
    if (next[at] != kNone) previous[next[at]] = at;
    renew(at);
    if (previous[at] != kNone) renew(previous[at]);
  }
  std::erase_if(symbols, [](const Scratch::Symbol& symbol) { return symbol.id < 0; });
}

}  // namespace tessera
