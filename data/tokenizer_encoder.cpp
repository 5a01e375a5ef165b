#include "data/tokenizer_encoder.h"

#include "checkpoint/posix_file.h"
#include "data/content_hash.h"

namespace tessera {

TextEncoder make_text_encoder(std::shared_ptr<const Tokenizer> tokenizer,
                              const std::filesystem::path& path) {
  TextEncoder encoder;
  encoder.encode = [tokenizer](std::string_view text, std::vector<std::int32_t>& ids) {
    EncodeOptions options;
    options.add_special_tokens = false;
    tokenizer->encode_append(text, options, ids);
  };
  encoder.decode = [tokenizer](std::span<const std::int32_t> ids) { return tokenizer->decode(ids, false); };
  encoder.token_text = [tokenizer](std::int32_t id) {
    return tokenizer->id_to_token(id).value_or("(no token)");
  };
  encoder.document_start.assign(tokenizer->prefix_ids().begin(), tokenizer->prefix_ids().end());
  if (tokenizer->special_ids().eos >= 0) encoder.document_end = {tokenizer->special_ids().eos};
  encoder.vocab_size = tokenizer->vocab_size();
  const bool is_folder = std::filesystem::is_directory(path);
  std::string content;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}) {
    const std::filesystem::path file = is_folder ? path / name : path;
    if (!std::filesystem::exists(file)) continue;
    content += read_text_file(file, std::uint64_t{256} << 20, "tokenizer");
    if (!is_folder) break;
  }
  encoder.fingerprint = ContentHash().add(content).hex();
  return encoder;
}

}  // namespace tessera
