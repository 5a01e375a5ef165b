// Decodes a growing list of ids for display while it is generated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer/tokenizer.h"

namespace tessera {

class DecodeStream {
 public:
  // `tokenizer` must outlive this.
  explicit DecodeStream(const Tokenizer& tokenizer, bool skip_special_tokens = true)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  // The text that `id` completes; empty while a character is still missing bytes. Of ids that spell
  // valid UTF-8 the pieces and finish() together are decode() of all of them.
  std::string step(std::int32_t id);
  // What is still held back, incomplete characters as U+FFFD.
  std::string finish();

 private:
  std::string take(bool all);

  const Tokenizer& tokenizer_;
  bool skip_special_tokens_;
  // Tokens depend on their neighbours (blanks, bytes of one character): the ones whose text is out
  // stay as context for the next.
  std::vector<std::int32_t> ids_;
  std::size_t num_shown_ = 0;  // ids_ whose text is out
  std::string shown_;          // decode() of those
};

}  // namespace tessera
