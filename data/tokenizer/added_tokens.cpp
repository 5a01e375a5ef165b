#include "data/tokenizer/added_tokens.h"

#include <algorithm>
#include <cstring>

#include "data/tokenizer/unicode.h"
#include "data/tokenizer/utf8.h"

namespace tessera {
namespace {

bool is_word_at(std::string_view text, std::size_t at) {
  return word_set().contains(utf8::decode(text.data() + at).code_point);
}

bool is_space_at(std::string_view text, std::size_t at) {
  return is_space(utf8::decode(text.data() + at).code_point);
}

}  // namespace

void TokenFinder::add(std::string_view text, std::int32_t id) {
  if (text.empty()) return;
  if (nodes_.empty()) nodes_.emplace_back();
  const auto first = static_cast<unsigned char>(text[0]);
  if (!starts_[first]) {
    starts_[first] = true;
    only_start_ = first;
    ++num_starts_;
  }
  std::int32_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    std::int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<std::int32_t>(nodes_.size());
      nodes_.push_back({-1, nodes_[static_cast<std::size_t>(node)].first_child, -1, byte});
      nodes_[static_cast<std::size_t>(node)].first_child = next;
    }
    node = next;
  }
  nodes_[static_cast<std::size_t>(node)].id = id;
}

std::int32_t TokenFinder::child(std::int32_t node, unsigned char byte) const {
  std::int32_t at = nodes_[static_cast<std::size_t>(node)].first_child;
  while (at >= 0 && nodes_[static_cast<std::size_t>(at)].byte != byte) {
    at = nodes_[static_cast<std::size_t>(at)].next_sibling;
  }
  return at;
}

bool TokenFinder::find(std::string_view text, std::size_t from, Found* found) const {
  for (std::size_t i = from; i < text.size(); ++i) {
    if (num_starts_ == 1) {
      const void* hit = std::memchr(text.data() + i, only_start_, text.size() - i);
      if (hit == nullptr) return false;
      i = static_cast<std::size_t>(static_cast<const char*>(hit) - text.data());
    } else {
      while (i < text.size() && !starts_[static_cast<unsigned char>(text[i])]) ++i;
    }
    std::int32_t node = 0;
    std::int32_t id = -1;
    std::size_t end = i;
    for (std::size_t k = i; k < text.size(); ++k) {
      node = child(node, static_cast<unsigned char>(text[k]));
      if (node < 0) break;
      if (nodes_[static_cast<std::size_t>(node)].id >= 0) {
        id = nodes_[static_cast<std::size_t>(node)].id;
        end = k + 1;
      }
    }
    if (id >= 0) {
      *found = {i, end, id};
      return true;
    }
  }
  return false;
}

void AddedTokens::set(std::int32_t id, AddedToken token, std::string normal_form) {
  ids_by_content_[token.content] = id;
  largest_id_ = std::max(largest_id_, id);
  entries_[id] = {std::move(token), std::move(normal_form)};
}

void AddedTokens::rebuild() {
  raw_ = TokenFinder();
  normalized_ = TokenFinder();
  for (const std::int32_t id : ids()) {
    const Entry& entry = entries_.at(id);
    if (entry.token.normalized) {
      normalized_.add(entry.normal_form, id);
    } else {
      raw_.add(entry.token.content, id);
    }
  }
}

const AddedToken* AddedTokens::find(std::int32_t id) const {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second.token;
}

std::int32_t AddedTokens::id_of(std::string_view content) const {
  const auto found = ids_by_content_.find(std::string(content));
  return found == ids_by_content_.end() ? -1 : found->second;
}

const std::string* AddedTokens::decoding_text(std::int32_t id) const {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return nullptr;
  return found->second.token.normalized ? &found->second.normal_form : &found->second.token.content;
}

bool AddedTokens::is_special(std::int32_t id) const {
  const AddedToken* token = find(id);
  return token != nullptr && token->special;
}

std::vector<std::int32_t> AddedTokens::ids() const {
  std::vector<std::int32_t> ids;
  for (const auto& [id, entry] : entries_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool AddedTokens::extend(std::string_view text, std::int32_t id, std::size_t done,
                         bool split_special, std::size_t* begin, std::size_t* end) const {
  const AddedToken& token = entries_.at(id).token;
  if (split_special && token.special) return false;
  if (token.single_word) {
    if (*begin > 0 && is_word_at(text, utf8::previous(text, *begin))) return false;
    if (*end < text.size() && is_word_at(text, *end)) return false;
  }
  if (token.lstrip) {
    std::size_t start = *begin;
    while (start > 0) {
      const std::size_t before = utf8::previous(text, start);
      if (!is_space_at(text, before)) break;
      start = before;
    }
    *begin = std::max(start, done);  // blanks that the token before took stay with it
  }
  if (token.rstrip) {
    while (*end < text.size() && is_space_at(text, *end)) {
      *end += utf8::sequence_length(text[*end]);
    }
  }
  *end = std::max(*begin, *end);
  return true;
}

}  // namespace tessera
