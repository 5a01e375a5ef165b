#include "data/tokenizer/decode_stream.h"

#include <span>

namespace tessera {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// A character has at most four bytes: text that still ends badly after this many tokens will not be
// mended by the next.
constexpr std::size_t kMaxHeld = 8;

}  // namespace

std::string DecodeStream::step(std::int32_t id) {
  ids_.push_back(id);
  return take(ids_.size() - num_shown_ >= kMaxHeld);
}

std::string DecodeStream::finish() {
  std::string text = take(true);
  ids_.clear();
  shown_.clear();
  num_shown_ = 0;
  return text;
}

std::string DecodeStream::take(bool all) {
  const std::string text = tokenizer_.decode(ids_, skip_special_tokens_);
  if (text.size() <= shown_.size() || (!all && text.ends_with(kReplacement))) return {};
  std::string fresh = text.substr(shown_.size());
  if (text.ends_with(kReplacement)) {
    // Broken bytes are out now: they must not join what comes.
    ids_.clear();
    num_shown_ = 0;
    shown_.clear();
    return fresh;
  }
  // The tokens just shown become the context; the older context is no longer needed.
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(num_shown_));
  num_shown_ = ids_.size();
  shown_ = tokenizer_.decode(ids_, skip_special_tokens_);
  return fresh;
}

}  // namespace tessera
