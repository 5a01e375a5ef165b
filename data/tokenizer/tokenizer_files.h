// The files of a tokenizer: tokenizer.json and what lies beside it in a model folder. They are kept
// in memory, so that an export at the end of a long run does not depend on the folder it began
// with.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/tokenizer/added_tokens.h"

namespace tessera {

struct TokenizerFiles {
  std::string name;                            // the path of tokenizer.json, for messages
  std::map<std::string, std::string> content;  // by file name
};

// `path` is a tokenizer.json (of any name) or a folder that holds one.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& path);

// What tokenizer_config.json and special_tokens_map.json say. Names are token texts.
struct TokenizerConfig {
  std::optional<std::string> bos;
  std::optional<std::string> eos;
  std::optional<std::string> pad;
  std::optional<std::string> unk;
  std::optional<bool> add_bos;
  std::optional<bool> add_eos;
  std::vector<std::pair<std::int32_t, AddedToken>> added_tokens;  // added_tokens_decoder, by id
};
TokenizerConfig parse_tokenizer_config(const TokenizerFiles& files);

// The same files with `tokens` in the lists of added tokens.
TokenizerFiles with_added_tokens(const TokenizerFiles& files,
                                 std::span<const std::pair<std::int32_t, AddedToken>> tokens);

// tokenizer.json and tokenizer_config.json of the byte tokenizer.
TokenizerFiles byte_tokenizer_files();

// Each file is replaced in one step. Throws kTransient if writing fails.
void write_tokenizer_files(const TokenizerFiles& files, const std::filesystem::path& folder);

}  // namespace tessera
