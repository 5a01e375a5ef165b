// Token texts and their ids, both ways, in flat arrays.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// 64-bit hash of a short text; the same on every machine of one byte order.
std::uint64_t hash_text(std::string_view text);

class Vocabulary {
 public:
  // Ids may have holes but not repeats; a text that repeats keeps its last id.
  void reserve(std::size_t tokens, std::size_t bytes);
  void add(std::string_view text, std::int32_t id);

  // -1 if unknown.
  std::int32_t id_of(std::string_view text) const;
  // Nothing for an id without a token. The view lives as long as the vocabulary is unchanged.
  std::optional<std::string_view> text_of(std::int32_t id) const;

  std::size_t num_tokens() const { return num_tokens_; }
  std::int32_t largest_id() const { return static_cast<std::int32_t>(by_id_.size()) - 1; }

 private:
  struct Entry {
    std::uint64_t offset = 0;
    std::uint32_t length = 0;
    bool exists = false;
  };
  struct Slot {
    std::uint32_t tag = 0;
    std::int32_t id = -1;
  };
  void grow();
  std::string_view view(const Entry& entry) const {
    return std::string_view(bytes_).substr(entry.offset, entry.length);
  }

  std::string bytes_;
  std::vector<Entry> by_id_;
  std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
  std::size_t num_tokens_ = 0;
};

}  // namespace tessera
