#include "data/encoder.h"

#include <memory>

#include "data/tokenizer/tokenizer.h"

namespace tessera {

TextEncoder byte_encoder() {
  const auto tokenizer = std::make_shared<const Tokenizer>(Tokenizer::bytes());
  TextEncoder encoder;
  // What the tokenizer would do, without the search for special tokens written out in the text.
  encoder.encode = [](std::string_view text, std::vector<std::int32_t>& ids) {
    ids.reserve(ids.size() + text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  };
  encoder.decode = [tokenizer](std::span<const std::int32_t> ids) {
    return tokenizer->decode(ids, false);
  };
  encoder.token_text = [tokenizer](std::int32_t id) {
    return tokenizer->id_to_token(id).value_or("(no token)");
  };
  encoder.document_start.assign(tokenizer->prefix_ids().begin(), tokenizer->prefix_ids().end());
  encoder.document_end = {tokenizer->special_ids().eos};
  encoder.vocab_size = tokenizer->vocab_size();
  encoder.fingerprint = "bytes/2";
  return encoder;
}

}  // namespace tessera
