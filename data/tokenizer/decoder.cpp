#include "data/tokenizer/decoder.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>

#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/json_fields.h"
#include "data/tokenizer/split_pattern.h"
#include "data/tokenizer/utf8.h"

namespace tessera {

class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};

namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

class ByteLevel final : public DecoderStep {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (const std::string& token : tokens) {
      // A token outside the alphabet (an added one) stands for itself.
      bytes += ByteAlphabet::instance().bytes_of(token).value_or(token);
    }
    std::string text;
    utf8::append_lossy(text, bytes);
    tokens.assign(1, std::move(text));
  }
};

class ByteFallback final : public DecoderStep {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::vector<std::string> out;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (utf8::find_invalid(bytes) == std::string_view::npos) {
        out.push_back(bytes);
      } else {
        out.insert(out.end(), bytes.size(), "\xEF\xBF\xBD");
      }
      bytes.clear();
    };
    for (std::string& token : tokens) {
      if (const auto byte = byte_of(token)) {
        bytes.push_back(*byte);
        continue;
      }
      flush();
      out.push_back(std::move(token));
    }
    flush();
    tokens = std::move(out);
  }

 private:
  // Any case of hexadecimal digits, unlike what the model looks up.
  static std::optional<char> byte_of(const std::string& token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
    int value = 0;
    for (const char c : {token[3], token[4]}) {
      if (!std::isxdigit(static_cast<unsigned char>(c))) return std::nullopt;
      value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return static_cast<char>(value);
  }
};

class Fuse final : public DecoderStep {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string all;
    for (const std::string& token : tokens) all += token;
    tokens.assign(1, std::move(all));
  }
};

class Strip final : public DecoderStep {
 public:
  Strip(std::string content, std::size_t start, std::size_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (std::size_t i = 0; i < start_ && rest.starts_with(content_); ++i) {
        rest.remove_prefix(content_.size());
      }
      for (std::size_t i = 0; i < stop_ && rest.ends_with(content_); ++i) {
        rest.remove_suffix(content_.size());
      }
      token = std::string(rest);
    }
  }

 private:
  std::string content_;
  std::size_t start_;
  std::size_t stop_;
};

class Replace final : public DecoderStep {
 public:
  Replace(SplitPattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      std::string out;
      std::size_t copied = 0;
      pattern_.for_each_match(token, [&](std::size_t begin, std::size_t end) {
        out.append(token, copied, begin - copied);
        out += content_;
        copied = end;
      });
      out.append(token, copied);
      token = std::move(out);
    }
  }

 private:
  SplitPattern pattern_;
  std::string content_;
};

class Metaspace final : public DecoderStep {
 public:
  Metaspace(std::string replacement, bool drops_first)
      : replacement_(std::move(replacement)), drops_first_(drops_first) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      replace_all(tokens[i], replacement_, i == 0 && drops_first_ ? "" : " ");
    }
  }

 private:
  std::string replacement_;
  bool drops_first_;
};

// End-of-word suffixes become blanks, but for the last.
class WordSuffix final : public DecoderStep {
 public:
  explicit WordSuffix(std::string suffix) : suffix_(std::move(suffix)) {}
  void apply(std::vector<std::string>& tokens) const override {
    if (suffix_.empty()) return;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      replace_all(tokens[i], suffix_, i + 1 == tokens.size() ? "" : " ");
    }
  }

 private:
  std::string suffix_;
};

class WordPiece final : public DecoderStep {
 public:
  WordPiece(std::string prefix, bool cleans_up)
      : prefix_(std::move(prefix)), cleans_up_(cleans_up) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      if (i > 0) {
        if (token.starts_with(prefix_)) {
          token.erase(0, prefix_.size());
        } else {
          token.insert(0, " ");
        }
      }
      if (!cleans_up_) continue;
      for (const auto& [from, to] : kCleanUp) replace_all(token, from, to);
    }
  }

 private:
  static constexpr std::pair<std::string_view, std::string_view> kCleanUp[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},     {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},   {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
  };
  std::string prefix_;
  bool cleans_up_;
};

void add_steps(const nlohmann::json& spec, std::string_view file,
               std::vector<std::unique_ptr<DecoderStep>>& steps) {
  const JsonFields fields(spec, file, "decoder");
  const std::string& type = fields.type();
  if (type == "Sequence") {
    for (const nlohmann::json& part : fields.array("decoders")) add_steps(part, file, steps);
  } else if (type == "ByteLevel") {
    steps.push_back(std::make_unique<ByteLevel>());
  } else if (type == "ByteFallback") {
    steps.push_back(std::make_unique<ByteFallback>());
  } else if (type == "Fuse") {
    steps.push_back(std::make_unique<Fuse>());
  } else if (type == "Strip") {
    const std::string content = fields.string("content");
    if (content.empty()) fields.refuse("\"content\" is empty");
    steps.push_back(std::make_unique<Strip>(content, fields.count("start"), fields.count("stop")));
  } else if (type == "Replace") {
    steps.push_back(std::make_unique<Replace>(fields.pattern("pattern"), fields.string("content")));
  } else if (type == "Metaspace") {
    const std::string replacement = fields.string("replacement");
    if (replacement.empty()) fields.refuse("\"replacement\" is empty");
    bool drops_first = fields.boolean("add_prefix_space", true);
    if (fields.has("prepend_scheme")) drops_first = fields.string("prepend_scheme") != "never";
    steps.push_back(std::make_unique<Metaspace>(replacement, drops_first));
  } else if (type == "BPEDecoder") {
    steps.push_back(std::make_unique<WordSuffix>(fields.string("suffix")));
  } else if (type == "WordPiece") {
    steps.push_back(
        std::make_unique<WordPiece>(fields.string("prefix"), fields.boolean("cleanup")));
  } else {
    fields.refuse_type();
  }
}

}  // namespace

Decoder::Decoder() = default;
Decoder::Decoder(const nlohmann::json& spec, std::string_view file)
    : joins_with_blanks_(spec.is_null()) {
  if (!spec.is_null()) add_steps(spec, file, steps_);
}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

std::string Decoder::decode(std::vector<std::string> tokens) const {
  for (const auto& step : steps_) step->apply(tokens);
  std::string text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (joins_with_blanks_ && i > 0) text += ' ';
    text += tokens[i];
  }
  return text;
}

}  // namespace tessera
