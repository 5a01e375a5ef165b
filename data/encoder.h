// How text becomes token ids: what preparation needs of a tokenizer, as plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct TextEncoder {
  // Appends the ids of `text`, without marks at start and end. Called from several threads at once.
  std::function<void(std::string_view text, std::vector<std::int32_t>& ids)> encode;
  std::function<std::string(std::span<const std::int32_t> ids)> decode;
  std::function<std::string(std::int32_t id)> token_text;  // for messages: "<s>", "\"ab\""

  std::vector<std::int32_t> document_start;  // put before each document: BOS
  std::vector<std::int32_t> document_end;    // put after it: EOS

  std::int64_t vocab_size = 0;  // ids are below this
  // Equal for two tokenizers only if they give the same ids for every text: part of cache keys.
  std::string fingerprint;
};

// The built-in byte tokenizer (Tokenizer::bytes): one token per byte, <|eos|> ends a document.
// Needs no file: for tests and first runs.
TextEncoder byte_encoder();

}  // namespace tessera
