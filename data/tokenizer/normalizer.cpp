#include "data/tokenizer/normalizer.h"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>

#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/json_fields.h"
#include "data/tokenizer/regex.h"
#include "data/tokenizer/split_pattern.h"
#include "data/tokenizer/unicode.h"
#include "data/tokenizer/unicode_normalizer.h"
#include "data/tokenizer/utf8.h"
#include "engine/core/error.h"

namespace tessera {

class NormalizerStep {
 public:
  virtual ~NormalizerStep() = default;
  // Whether the step would leave `text` as it is; a cheap look that may say no without need.
  virtual bool leaves(std::string_view text) const = 0;
  virtual void apply(const TextView& from, TextBuffer& to) const = 0;
};

namespace {

class UnicodeForm final : public NormalizerStep {
 public:
  explicit UnicodeForm(NormalForm form) : normalizer_(form) {}
  bool leaves(std::string_view text) const override { return normalizer_.is_normal(text); }
  void apply(const TextView& from, TextBuffer& to) const override {
    normalizer_.normalize(from, to);
  }

 private:
  UnicodeNormalizer normalizer_;
};

class Prepend final : public NormalizerStep {
 public:
  explicit Prepend(std::string text) : text_(std::move(text)) {}
  bool leaves(std::string_view text) const override { return text.empty() || text_.empty(); }
  void apply(const TextView& from, TextBuffer& to) const override {
    to.put(text_, from.origin_of(0));  // it has no text of its own: it belongs to the first one
    to.copy(from, 0, from.text.size());
  }

 private:
  std::string text_;
};

class Replace final : public NormalizerStep {
 public:
  Replace(SplitPattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  bool leaves(std::string_view text) const override { return text.empty(); }
  void apply(const TextView& from, TextBuffer& to) const override {
    std::size_t copied = 0;
    pattern_.for_each_match(from.text, [&](std::size_t begin, std::size_t end) {
      to.copy(from, copied, begin);
      to.put(content_, end > begin ? from.origin_of(begin, end)
                       : end > 0   ? from.origin_of(end - 1)
                                   : TextSpan{});
      copied = end;
    });
    to.copy(from, copied, from.text.size());
  }

 private:
  SplitPattern pattern_;
  std::string content_;
};

class Strip final : public NormalizerStep {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  bool leaves(std::string_view text) const override {
    return text.empty() ||
           !((left_ && is_space(utf8::decode(text.data()).code_point)) ||
             (right_ &&
              is_space(utf8::decode(text.data() + utf8::previous(text, text.size())).code_point)));
  }
  void apply(const TextView& from, TextBuffer& to) const override {
    std::size_t begin = 0;
    std::size_t end = from.text.size();
    while (left_ && begin < end) {
      const utf8::Decoded c = utf8::decode(from.text.data() + begin);
      if (!is_space(c.code_point)) break;
      begin += c.length;
    }
    while (right_ && begin < end) {
      const std::size_t last = utf8::previous(from.text, end);
      if (!is_space(utf8::decode(from.text.data() + last).code_point)) break;
      end = last;
    }
    to.copy(from, begin, end);
  }

 private:
  bool left_;
  bool right_;
};

// Steps that look at one code point at a time: `Map(c, from, begin, end, to)` writes what `c`
// becomes.
template <typename Map>
class PerCodePoint final : public NormalizerStep {
 public:
  explicit PerCodePoint(Map map) : map_(map) {}
  bool leaves(std::string_view text) const override { return text.empty(); }
  void apply(const TextView& from, TextBuffer& to) const override {
    for (std::size_t i = 0; i < from.text.size();) {
      const utf8::Decoded c = utf8::decode(from.text.data() + i);
      map_(c.code_point, from, i, i + c.length, to);
      i += c.length;
    }
  }

 private:
  Map map_;
};

template <typename Map>
std::unique_ptr<NormalizerStep> per_code_point(Map map) {
  return std::make_unique<PerCodePoint<Map>>(map);
}

void lowercase(char32_t c, const TextView& from, std::size_t begin, std::size_t end,
               TextBuffer& to) {
  char32_t second = 0;
  const char32_t lower = to_lower(c, &second);
  if (lower == c) return to.copy(from, begin, end);
  std::string text = utf8::encode(lower);
  if (second != 0) utf8::append(text, second);
  to.put(text, from.origin_of(begin, end));
}

void strip_accents(char32_t c, const TextView& from, std::size_t begin, std::size_t end,
                   TextBuffer& to) {
  if (!accent_set().contains(c)) to.copy(from, begin, end);
}

// SentencePiece's nmt rules: control characters vanish, other kinds of blank become spaces.
void nmt(char32_t c, const TextView& from, std::size_t begin, std::size_t end, TextBuffer& to) {
  if ((c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F || c == 0x8F ||
      c == 0x9F) {
    return;
  }
  const bool is_blank = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                        (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                        c == 0xFEFF || c == 0xFFFD;
  if (!is_blank) return to.copy(from, begin, end);
  to.put(" ", from.origin_of(begin, end));
}

void byte_level(char32_t, const TextView& from, std::size_t begin, std::size_t end,
                TextBuffer& to) {
  for (std::size_t i = begin; i < end; ++i) {
    to.put(ByteAlphabet::instance().text(static_cast<unsigned char>(from.text[i])),
           from.origin_of(begin, end));
  }
}

void add_steps(const nlohmann::json& spec, std::string_view file,
               std::vector<std::unique_ptr<NormalizerStep>>& steps) {
  if (spec.is_null()) return;
  const JsonFields fields(spec, file, "normalizer");
  const std::string& type = fields.type();
  if (type == "Sequence") {
    for (const nlohmann::json& part : fields.array("normalizers")) add_steps(part, file, steps);
  } else if (type == "NFC") {
    steps.push_back(std::make_unique<UnicodeForm>(NormalForm::kNfc));
  } else if (type == "NFD") {
    steps.push_back(std::make_unique<UnicodeForm>(NormalForm::kNfd));
  } else if (type == "NFKC") {
    steps.push_back(std::make_unique<UnicodeForm>(NormalForm::kNfkc));
  } else if (type == "NFKD") {
    steps.push_back(std::make_unique<UnicodeForm>(NormalForm::kNfkd));
  } else if (type == "Prepend") {
    steps.push_back(std::make_unique<Prepend>(fields.string("prepend")));
  } else if (type == "Replace") {
    steps.push_back(std::make_unique<Replace>(fields.pattern("pattern"), fields.string("content")));
  } else if (type == "Strip") {
    steps.push_back(
        std::make_unique<Strip>(fields.boolean("strip_left"), fields.boolean("strip_right")));
  } else if (type == "Lowercase") {
    steps.push_back(per_code_point(lowercase));
  } else if (type == "StripAccents") {
    steps.push_back(per_code_point(strip_accents));
  } else if (type == "Nmt") {
    steps.push_back(per_code_point(nmt));
  } else if (type == "ByteLevel") {
    steps.push_back(per_code_point(byte_level));
  } else {
    fields.refuse_type();
  }
}

}  // namespace

Normalizer::Normalizer() = default;
Normalizer::Normalizer(const nlohmann::json& spec, std::string_view file) {
  add_steps(spec, file, steps_);
}
Normalizer::~Normalizer() = default;
Normalizer::Normalizer(Normalizer&&) noexcept = default;
Normalizer& Normalizer::operator=(Normalizer&&) noexcept = default;

TextView Normalizer::apply(const TextView& text, bool keep_origin, Scratch& scratch) const {
  TextView current = text;
  int next = 0;
  for (const auto& step : steps_) {
    if (step->leaves(current.text)) continue;
    TextBuffer& to = scratch.buffers[next];
    to.reset(keep_origin);
    step->apply(current, to);
    current = to.view();
    next = 1 - next;
  }
  return current;
}

}  // namespace tessera
