#include "data/tokenizer/vocabulary.h"

#include <cstring>

namespace tessera {
namespace {

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

std::uint64_t hash_text(std::string_view text) {
  // Multiply-and-fold over 8-byte words, the last one overlapping (as wyhash does).
  constexpr std::uint64_t kFirst = 0x9E3779B97F4A7C15ull;
  constexpr std::uint64_t kSecond = 0xD6E8FEB86659FD93ull;
  std::uint64_t hash = kFirst ^ text.size();
  const char* p = text.data();
  std::size_t left = text.size();
  std::uint64_t word = 0;
  for (; left >= 8; p += 8, left -= 8) {
    std::memcpy(&word, p, 8);
    hash = mix(hash ^ word, kSecond);
  }
  if (left > 0) {
    word = 0;
    std::memcpy(&word, p, left);
    hash = mix(hash ^ word, kSecond);
  }
  return mix(hash, kFirst);
}

void Vocabulary::reserve(std::size_t tokens, std::size_t bytes) {
  by_id_.reserve(tokens);
  bytes_.reserve(bytes);
  while (slots_.size() < 2 * tokens) grow();
}

void Vocabulary::grow() {
  std::vector<Slot> old = std::move(slots_);
  slots_.assign(old.empty() ? 64 : old.size() * 2, Slot{});
  for (const Slot& slot : old) {
    if (slot.id < 0) continue;
    const std::uint64_t hash = hash_text(view(by_id_[static_cast<std::size_t>(slot.id)]));
    std::size_t at = hash & (slots_.size() - 1);
    while (slots_[at].id >= 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = slot;
  }
}

void Vocabulary::add(std::string_view text, std::int32_t id) {
  if (2 * (num_tokens_ + 1) > slots_.size()) grow();
  const auto index = static_cast<std::size_t>(id);
  if (index >= by_id_.size()) by_id_.resize(index + 1);
  by_id_[index] = {bytes_.size(), static_cast<std::uint32_t>(text.size()), true};
  bytes_ += text;
  const std::uint64_t hash = hash_text(text);
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  std::size_t at = hash & (slots_.size() - 1);
  while (slots_[at].id >= 0) {
    if (slots_[at].tag == tag && view(by_id_[static_cast<std::size_t>(slots_[at].id)]) == text) {
      slots_[at].id = id;
      return;
    }
    at = (at + 1) & (slots_.size() - 1);
  }
  slots_[at] = {tag, id};
  ++num_tokens_;
}

std::int32_t Vocabulary::id_of(std::string_view text) const {
  if (slots_.empty()) return -1;
  const std::uint64_t hash = hash_text(text);
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  for (std::size_t at = hash & (slots_.size() - 1); slots_[at].id >= 0;
       at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].tag == tag && view(by_id_[static_cast<std::size_t>(slots_[at].id)]) == text) {
      return slots_[at].id;
    }
  }
  return -1;
}

std::optional<std::string_view> Vocabulary::text_of(std::int32_t id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= by_id_.size()) return std::nullopt;
  const Entry& entry = by_id_[static_cast<std::size_t>(id)];
  if (!entry.exists) return std::nullopt;
  return view(entry);
}

}  // namespace tessera
