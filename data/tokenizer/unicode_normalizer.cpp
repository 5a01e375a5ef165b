#include "data/tokenizer/unicode_normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "data/tokenizer/utf8.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// The reference library's tables are those of Unicode 9. Decompositions and combining classes of
// existing code points are stable, so ICU of any later version agrees once younger ones are left
// out.
constexpr int kUnicodeMajor = 9;

bool is_younger(UChar32 c) {
  UVersionInfo age;
  u_charAge(c, age);
  return age[0] > kUnicodeMajor;
}

void check(UErrorCode status, const char* what) {
  CHECK(U_SUCCESS(status), "[tokenizer] ICU: {} failed: {}", what, u_errorName(status));
}

const icu::Normalizer2* icu_normalizer(NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* found = nullptr;
  switch (form) {
    case NormalForm::kNfc:
      found = icu::Normalizer2::getNFCInstance(status);
      break;
    case NormalForm::kNfd:
      found = icu::Normalizer2::getNFDInstance(status);
      break;
    case NormalForm::kNfkc:
      found = icu::Normalizer2::getNFKCInstance(status);
      break;
    case NormalForm::kNfkd:
      found = icu::Normalizer2::getNFKDInstance(status);
      break;
  }
  check(status, "Normalizer2");
  return found;
}

UProperty quick_check_property(NormalForm form) {
  switch (form) {
    case NormalForm::kNfc:
      return UCHAR_NFC_QUICK_CHECK;
    case NormalForm::kNfd:
      return UCHAR_NFD_QUICK_CHECK;
    case NormalForm::kNfkc:
      return UCHAR_NFKC_QUICK_CHECK;
    case NormalForm::kNfkd:
      return UCHAR_NFKD_QUICK_CHECK;
  }
  return UCHAR_NFC_QUICK_CHECK;
}

}  // namespace

struct UnicodeNormalizer::Impl {
  explicit Impl(NormalForm form) : normalizer(*icu_normalizer(form), known) {
    // A code point is plain if it begins a new unit and stays as it is. A text of plain code points
    // is normal; a unit that is not goes from the plain code point before it to the next one.
    const UProperty property = quick_check_property(form);
    plain.assign(0x110000 / 64, ~std::uint64_t{0});
    lowest_special = 0x110000;
    for (UChar32 c = 0; c < 0xE1000; ++c) {
      if (c == 0x40000) c = 0xE0000;  // the planes between are unassigned
      if (is_younger(c)) {
        known.remove(c);
      } else if (u_getIntPropertyValue(c, property) != UNORM_YES || u_getCombiningClass(c) != 0) {
        lowest_special = std::min(lowest_special, static_cast<char32_t>(c));
        plain[static_cast<std::size_t>(c) >> 6] &= ~(std::uint64_t{1} << (c & 63));
      }
    }
    known.freeze();
    std::string first;
    utf8::append(first, lowest_special);
    first_special_byte = static_cast<unsigned char>(first[0]);
  }

  bool is_plain(char32_t c) const { return (plain[c >> 6] >> (c & 63) & 1) != 0; }

  // The start of the first code point at or after `i` that is not plain.
  std::size_t find_special(std::string_view text, std::size_t i) const {
    constexpr std::uint64_t kHighBits = 0x8080808080808080ull;
    while (i < text.size()) {
      std::uint64_t word;
      if (i + sizeof word <= text.size()) {
        std::memcpy(&word, text.data() + i, sizeof word);
        if ((word & kHighBits) == 0) {
          i += sizeof word;
          continue;
        }
      }
      if (static_cast<unsigned char>(text[i]) < first_special_byte) {
        ++i;  // continuation bytes are passed here too, or with the code point below
        continue;
      }
      if (utf8::is_continuation(text[i])) {
        ++i;
        continue;
      }
      const utf8::Decoded c = utf8::decode(text.data() + i);
      if (!is_plain(c.code_point)) break;
      i += c.length;
    }
    return i;
  }

  icu::UnicodeSet known{0, 0x10FFFF};
  icu::FilteredNormalizer2 normalizer;
  std::vector<std::uint64_t> plain;
  char32_t lowest_special = 0;
  unsigned char first_special_byte = 0;  // lower bytes begin plain code points only
};

UnicodeNormalizer::UnicodeNormalizer(NormalForm form) : impl_(std::make_unique<Impl>(form)) {}
UnicodeNormalizer::~UnicodeNormalizer() = default;
UnicodeNormalizer::UnicodeNormalizer(UnicodeNormalizer&&) noexcept = default;
UnicodeNormalizer& UnicodeNormalizer::operator=(UnicodeNormalizer&&) noexcept = default;

bool UnicodeNormalizer::is_normal(std::string_view text) const {
  return impl_->find_special(text, 0) == text.size();
}

void UnicodeNormalizer::normalize(const TextView& from, TextBuffer& to) const {
  const std::string_view text = from.text;
  std::string normal;
  std::size_t copied = 0;
  for (;;) {
    const std::size_t special = impl_->find_special(text, copied);
    if (special == text.size()) break;
    const std::size_t begin = special > copied ? utf8::previous(text, special) : special;
    std::size_t end = special;
    while (end < text.size()) {
      const utf8::Decoded c = utf8::decode(text.data() + end);
      if (impl_->is_plain(c.code_point)) break;
      end += c.length;
    }
    to.copy(from, copied, begin);
    normal.clear();
    icu::StringByteSink<std::string> sink(&normal);
    UErrorCode status = U_ZERO_ERROR;
    impl_->normalizer.normalizeUTF8(
        0, icu::StringPiece(text.data() + begin, static_cast<std::int32_t>(end - begin)), sink,
        nullptr, status);
    check(status, "normalizeUTF8");
    to.put(normal, from.origin_of(begin, end));
    copied = end;
  }
  to.copy(from, copied, text.size());
}

}  // namespace tessera
