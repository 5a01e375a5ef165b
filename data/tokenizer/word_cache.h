// Remembers the tokens of words met before. One per thread of encoding: no locks, bounded memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/vocabulary.h"

namespace tessera {

class WordCache {
 public:
  static constexpr std::size_t kMaxWord = 128;  // bytes; longer words are not kept

  WordCache() : short_(kSlots), long_(kSlots / 4) {}

  // What find() leaves for insert().
  struct Place {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    std::size_t slot = 0;
  };

  // The tokens of `word`, valid until the next insert; an empty span if it is not there. `word`
  // must not be empty.
  std::span<const std::int32_t> find(std::string_view word, Place* place) const {
    if (word.size() <= kShortWord) {
      load_key(word, &place->low, &place->high);
      place->slot = slot_of(place->low, place->high, short_.size());
      const ShortEntry& entry = short_[place->slot];
      if (entry.low != place->low || entry.high != place->high) return {};
      if (entry.count <= kInlineIds) return {entry.ids, entry.count};
      return {ids_.data() + static_cast<std::size_t>(entry.ids[0]), entry.count};
    }
    place->low = hash_text(word);
    place->slot = place->low & (long_.size() - 1);
    const LongEntry& entry = long_[place->slot];
    if (entry.hash != place->low || entry.length != word.size() ||
        std::memcmp(bytes_.data() + entry.offset, word.data(), word.size()) != 0) {
      return {};
    }
    return {ids_.data() + entry.first_id, entry.count};
  }

  // `ids` must not be empty.
  void insert(std::string_view word, const Place& place, std::span<const std::int32_t> ids) {
    if (word.size() > kMaxWord) return;
    const bool is_short = word.size() <= kShortWord;
    // Entries that a new word replaces leave their ids behind: start again when that is too much.
    if (ids_.size() + ids.size() > kMaxIds || bytes_.size() + word.size() > kMaxBytes) clear();
    std::size_t first_id = 0;
    if (!is_short || ids.size() > kInlineIds) {
      first_id = ids_.size();
      ids_.insert(ids_.end(), ids.begin(), ids.end());
    }
    if (is_short) {
      ShortEntry& entry = short_[place.slot];
      entry.low = place.low;
      entry.high = place.high;
      entry.count = static_cast<std::uint32_t>(ids.size());
      if (ids.size() <= kInlineIds) {
        std::memcpy(entry.ids, ids.data(), ids.size_bytes());
      } else {
        entry.ids[0] = static_cast<std::int32_t>(first_id);
      }
      return;
    }
    LongEntry& entry = long_[place.slot];
    entry.hash = place.low;
    entry.offset = static_cast<std::uint32_t>(bytes_.size());
    entry.length = static_cast<std::uint32_t>(word.size());
    entry.first_id = static_cast<std::uint32_t>(first_id);
    entry.count = static_cast<std::uint32_t>(ids.size());
    bytes_ += word;
  }

  void clear() {
    std::fill(short_.begin(), short_.end(), ShortEntry{});
    std::fill(long_.begin(), long_.end(), LongEntry{});
    ids_.clear();
    bytes_.clear();
  }

 private:
  static constexpr std::size_t kSlots = std::size_t{1} << 16;
  static constexpr std::size_t kShortWord = 15;  // with its length a word of 15 bytes fills 16
  static constexpr std::size_t kInlineIds = 3;
  static constexpr std::size_t kMaxIds = std::size_t{1} << 20;
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 21;

  struct ShortEntry {
    std::uint64_t low = 0;
    std::uint64_t high = 0;  // the length is in the top byte, so an empty slot equals no word
    std::int32_t ids[kInlineIds] = {0, 0, 0};  // more than fit: ids[0] is where they are
    std::uint32_t count = 0;
  };
  struct LongEntry {
    std::uint64_t hash = 0;
    std::uint32_t offset = 0;
    std::uint32_t length = 0;
    std::uint32_t first_id = 0;
    std::uint32_t count = 0;
  };

  template <typename Word>
  static std::uint64_t load(const char* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
  }

  // The bytes of the word as two numbers, read without passing its end.
  static void load_key(std::string_view word, std::uint64_t* low, std::uint64_t* high) {
    const char* p = word.data();
    const std::size_t n = word.size();
    *high = static_cast<std::uint64_t>(n) << 56;
    if (n >= 8) {
      *low = load<std::uint64_t>(p);
      if (n > 8) *high |= load<std::uint64_t>(p + n - 8) >> (8 * (16 - n));
    } else if (n >= 4) {
      *low = load<std::uint32_t>(p) | load<std::uint32_t>(p + n - 4) << (8 * (n - 4));
    } else {
      *low = load<std::uint8_t>(p) | load<std::uint8_t>(p + n / 2) << (8 * (n / 2)) |
             load<std::uint8_t>(p + n - 1) << (8 * (n - 1));
    }
  }

  static std::size_t slot_of(std::uint64_t low, std::uint64_t high, std::size_t size) {
    const auto product = static_cast<unsigned __int128>(low ^ 0x9E3779B97F4A7C15ull) *
                         (high ^ 0xD6E8FEB86659FD93ull);
    return (static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64)) &
           (size - 1);
  }

  std::vector<ShortEntry> short_;
  std::vector<LongEntry> long_;
  std::vector<std::int32_t> ids_;
  std::string bytes_;
};

}  // namespace tessera
