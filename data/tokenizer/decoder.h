// The decoder of a tokenizer.json: from token texts back to text.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class DecoderStep;

class Decoder {
 public:
  Decoder();  // joins the tokens with blanks, as a file without a decoder asks for
  // `spec` is the file's "decoder" (may be null). Throws kUser naming `file` and the part if it is
  // not supported.
  Decoder(const nlohmann::json& spec, std::string_view file);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  // Bytes that are no valid UTF-8 come out as U+FFFD.
  std::string decode(std::vector<std::string> tokens) const;

 private:
  bool joins_with_blanks_ = true;
  std::vector<std::unique_ptr<DecoderStep>> steps_;
};

}  // namespace tessera
