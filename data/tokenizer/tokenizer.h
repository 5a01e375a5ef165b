// Tokenizer: text to token ids and back, as the tokenizer.json of a Hugging Face model says, id for
// id. Loaded once, then immutable but for add_tokens; encoding and decoding are safe from any
// number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/tokenizer_files.h"

namespace tessera {

struct EncodeOptions {
  bool add_special_tokens = true;  // what the file's post-processor adds (BOS and the like)
  // Special tokens that are written out in the text are encoded as plain text: for text that a
  // stranger wrote.
  bool split_special_tokens = false;
};

// Token ids and the bytes of the original text that each stands for. Spans lie on character
// borders: tokens that share a character share its bytes. Blanks belong to the token that spells
// them. Added special tokens have empty spans.
struct Encoding {
  std::vector<std::int32_t> ids;
  std::vector<TextSpan> spans;
};

class Tokenizer {
 public:
  // -1 where the files name no such token.
  struct SpecialIds {
    std::int32_t bos = -1;
    std::int32_t eos = -1;
    std::int32_t pad = -1;
    std::int32_t unk = -1;
  };

  // `path` is a tokenizer.json, or a folder that holds one; tokenizer_config.json and
  // special_tokens_map.json beside it name the special tokens. Throws kUser naming the file and the
  // part that is missing, damaged or not supported.
  static Tokenizer load(const std::filesystem::path& path);

  // The built-in byte tokenizer: ids 0-255 are the byte values, then <|bos|>, <|eos|> and <|pad|>.
  // Takes any bytes.
  static Tokenizer bytes();

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Text must be valid UTF-8 below 4 GiB (else kUser, naming the first bad byte).
  std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens) const;
  void encode_append(std::string_view text, const EncodeOptions& options,
                     std::vector<std::int32_t>& ids) const;
  Encoding encode_with_spans(std::string_view text, const EncodeOptions& options = {}) const;
  // Texts one after another on `num_threads` threads (0: one per processor); the order of the
  // results is that of the texts.
  std::vector<std::vector<std::int32_t>> encode_batch(std::span<const std::string_view> texts,
                                                      const EncodeOptions& options,
                                                      int num_threads = 0) const;

  // Ids without a token are left out; bytes that are no UTF-8 become U+FFFD.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const;

  // Rows that an embedding needs: the largest id plus one.
  std::int32_t vocab_size() const;
  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  // As the vocabulary spells it ("Ġthe", "▁the").
  std::optional<std::string> id_to_token(std::int32_t id) const;
  bool is_special(std::int32_t id) const;

  const SpecialIds& special_ids() const;
  void set_special_ids(const SpecialIds& ids);

  // What encode adds around a text.
  std::span<const std::int32_t> prefix_ids() const;
  std::span<const std::int32_t> suffix_ids() const;

  // Adds tokens, or changes the flags of those that exist; returns their ids. New ids follow
  // vocab_size(). Not while other threads encode.
  std::vector<std::int32_t> add_tokens(std::span<const AddedToken> tokens);

  // Writes the tokenizer's files into the existing folder: those it was loaded from, with the
  // tokens that were added since.
  void save(const std::filesystem::path& folder) const;
  // What save writes.
  TokenizerFiles files() const;

  // Text of tokenizer_config.json or another file beside tokenizer.json as it was loaded; empty if
  // there was none.
  const std::string& side_file(const std::string& name) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
