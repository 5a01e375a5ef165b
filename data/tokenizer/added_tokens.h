// Added tokens: texts that are found in the input before the model sees it (special tokens, tokens
// added for fine-tuning). Some are matched in the text as it stands, others after normalisation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer/text_view.h"

namespace tessera {

// Field names as in tokenizer.json.
struct AddedToken {
  std::string content;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the blanks on its left with it
  bool rstrip = false;       // takes the blanks on its right with it
  bool normalized = true;    // matched after normalisation, in its own normal form
  bool special = false;      // left out by decode(skip_special_tokens)
};

// Finds the longest of a set of texts at the leftmost place.
class TokenFinder {
 public:
  void add(std::string_view text, std::int32_t id);
  bool empty() const { return nodes_.empty(); }

  struct Found {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::int32_t id = -1;
  };
  // False if there is none at or after `from`.
  bool find(std::string_view text, std::size_t from, Found* found) const;

 private:
  struct Node {
    std::int32_t first_child = -1;
    std::int32_t next_sibling = -1;
    std::int32_t id = -1;
    unsigned char byte = 0;
  };
  std::int32_t child(std::int32_t node, unsigned char byte) const;

  std::vector<Node> nodes_;  // node 0 is the root
  bool starts_[256] = {};
  int num_starts_ = 0;
  unsigned char only_start_ = 0;
};

class AddedTokens {
 public:
  // `normal_form` is what the normalizer makes of the content; it matters only for normalized ones.
  // Replaces an earlier token of the same id.
  void set(std::int32_t id, AddedToken token, std::string normal_form);
  void rebuild();  // after the last set()

  bool has_raw() const { return !raw_.empty(); }
  bool has_normalized() const { return !normalized_.empty(); }

  const AddedToken* find(std::int32_t id) const;
  // -1 if there is no added token with this content.
  std::int32_t id_of(std::string_view content) const;
  // What decoding starts from: the normal form of a normalized token, else the content.
  const std::string* decoding_text(std::int32_t id) const;
  bool is_special(std::int32_t id) const;
  std::int32_t largest_id() const { return largest_id_; }
  std::vector<std::int32_t> ids() const;  // ascending

  // Cuts `piece` at the added tokens of one kind: calls text(TextView) for what lies between and
  // token(id, TextView) for each token with the blanks it takes. With `split_special` special
  // tokens are left in the text.
  template <typename Text, typename Token>
  void cut(const TextView& piece, bool normalized, bool split_special, Text&& text,
           Token&& token) const {
    const TokenFinder& finder = normalized ? normalized_ : raw_;
    if (finder.empty()) return text(piece);
    std::size_t done = 0;
    std::size_t from = 0;
    TokenFinder::Found found;
    while (finder.find(piece.text, from, &found)) {
      from = found.end;
      std::size_t begin = found.begin;
      std::size_t end = found.end;
      if (!extend(piece.text, found.id, done, split_special, &begin, &end)) continue;
      if (done < begin) text(piece.part(done, begin));
      token(found.id, piece.part(begin, end));
      done = end;
    }
    if (done != piece.text.size()) text(piece.part(done, piece.text.size()));
  }

 private:
  struct Entry {
    AddedToken token;
    std::string normal_form;
  };
  // Applies the flags of a match; false if it does not count.
  bool extend(std::string_view text, std::int32_t id, std::size_t done, bool split_special,
              std::size_t* begin, std::size_t* end) const;

  std::unordered_map<std::int32_t, Entry> entries_;
  std::unordered_map<std::string, std::int32_t> ids_by_content_;
  TokenFinder raw_;
  TokenFinder normalized_;
  std::int32_t largest_id_ = -1;
};

}  // namespace tessera
