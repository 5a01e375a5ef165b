// Unicode normalisation (NFC, NFD, NFKC, NFKD) through ICU, held at the Unicode version of the
// reference library: code points that are younger stay as they are.
#pragma once

#include <memory>
#include <string_view>

#include "data/tokenizer/text_view.h"

namespace tessera {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

class UnicodeNormalizer {
 public:
  explicit UnicodeNormalizer(NormalForm form);
  ~UnicodeNormalizer();
  UnicodeNormalizer(UnicodeNormalizer&&) noexcept;
  UnicodeNormalizer& operator=(UnicodeNormalizer&&) noexcept;

  // True if a quick look finds `text` in the normal form already; false says nothing.
  bool is_normal(std::string_view text) const;

  // Appends the normal form of `from` to `to`. What is composed, decomposed or reordered together
  // has one origin: all of it.
  void normalize(const TextView& from, TextBuffer& to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
