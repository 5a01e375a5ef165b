// The pre-tokenizer of a tokenizer.json: stages that cut (and some that rewrite) a piece of text
// into the words that the model sees one at a time.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/code_point_set.h"
#include "data/tokenizer/split_pattern.h"
#include "data/tokenizer/text_view.h"
#include "data/tokenizer/utf8.h"

namespace tessera {

// What becomes of the matches of a split; names as in the file.
enum class SplitBehavior : std::uint8_t {
  kIsolated,
  kRemoved,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,
};

class PreTokenizer {
 public:
  // Text that the stages rewrite; one set per stage.
  struct StageBuffers {
    TextBuffer whole;
    TextBuffer word;
  };
  using Scratch = std::vector<StageBuffers>;

  PreTokenizer();  // one word: the whole piece
  // `spec` is the file's "pre_tokenizer" (may be null). Throws kUser naming `file` and the part if
  // it is not supported.
  PreTokenizer(const nlohmann::json& spec, std::string_view file);

  // True if the last stage spells each byte in GPT-2's alphabet and no earlier one does. Then
  // keep_bytes() makes that stage hand the bytes on as they are.
  bool ends_in_byte_level() const;
  void keep_bytes();

  // True if a stage looks at where in the original a piece begins and an earlier rewrite hides it,
  // so that origins must be kept even where nobody asks for offsets.
  bool needs_origin(bool has_normalizer) const;

  // True if a stage needs to see code points; false if any bytes will do.
  bool needs_utf8() const;

  // Calls sink(const TextView&) for each word that is not empty, in order. Words live until the
  // sink returns.
  template <typename Sink>
  void for_each_word(const TextView& piece, bool keep_origin, Scratch& scratch, Sink&& sink) const {
    if (piece.text.empty()) return;  // a normalizer may leave nothing: no blank is put before that
    if (stages_.empty()) return sink(piece);
    if (scratch.size() < stages_.size()) scratch.resize(stages_.size());
    walk(0, piece, keep_origin, scratch, sink);
  }

 private:
  struct Stage {
    enum class Kind : std::uint8_t {
      kSplit,            // pattern, behavior, is_inverted
      kSplitCodePoints,  // each code point of `set` is a match
      kWords,            // runs of word characters and runs of other marks; blanks vanish
      kByteLevel,        // adds_prefix_space, pattern if uses_pattern, spells_bytes
      kMetaspace,        // replacement, prepend, splits
      kFixedLength,      // length
    };
    enum class Prepend : std::uint8_t { kNever, kFirst, kAlways };

    template <typename Sink>
    void apply(const TextView& piece, bool keep_origin, StageBuffers& buffers, Sink&& sink) const;
    static void spell_bytes(const TextView& word, TextBuffer& to);
    template <typename ForEachMatch, typename Sink>
    void cut(const TextView& piece, ForEachMatch&& for_each_match, Sink&& sink) const;

    Kind kind = Kind::kSplit;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool is_inverted = false;
    bool adds_prefix_space = false;
    bool uses_pattern = false;
    bool spells_bytes = true;
    bool splits = false;
    Prepend prepend = Prepend::kNever;
    std::size_t length = 0;
    std::shared_ptr<const SplitPattern> pattern;  // shared by copies of the stage; immutable
    CodePointSet set;
    std::string replacement;
  };

  // Stages after the first are reached through one indirect call per piece, so that only the last
  // cut and the first are compiled for each sink.
  struct WordSink {
    void* target;
    void (*call)(void* target, const TextView& word);
    void operator()(const TextView& word) const { call(target, word); }
  };

  template <typename Sink>
  void walk(std::size_t stage, const TextView& piece, bool keep_origin, Scratch& scratch,
            Sink& sink) const {
    if (stage + 1 == stages_.size()) {
      stages_[stage].apply(piece, keep_origin, scratch[stage], sink);
      return;
    }
    WordSink erased{&sink, [](void* target, const TextView& word) {
                      (*static_cast<std::remove_reference_t<Sink>*>(target))(word);
                    }};
    walk_rest(stage, piece, keep_origin, scratch, erased);
  }
  void walk_rest(std::size_t stage, const TextView& piece, bool keep_origin, Scratch& scratch,
                 WordSink& sink) const;

  void add_stages(const nlohmann::json& spec, std::string_view file);

  std::vector<Stage> stages_;
};

// Cuts `piece` at the matches, merging each with its neighbours as the behaviour says.
template <typename ForEachMatch, typename Sink>
void PreTokenizer::Stage::cut(const TextView& piece, ForEachMatch&& for_each_match,
                              Sink&& sink) const {
  const auto emit = [&](std::size_t begin, std::size_t end) {
    if (begin < end) sink(piece.part(begin, end));
  };
  std::size_t covered = 0;
  if (behavior == SplitBehavior::kIsolated) {
    for_each_match(piece.text, [&](std::size_t begin, std::size_t end) {
      emit(covered, begin);
      emit(begin, end);
      covered = end;
    });
    emit(covered, piece.text.size());
    return;
  }
  // One part is held back until it is known what joins it.
  std::size_t held_begin = 0;
  std::size_t held_end = 0;
  bool has_held = false;
  bool held_is_match = false;  // a match and nothing else
  bool previous_is_match = false;
  const auto next = [&](std::size_t begin, std::size_t end, bool is_match) {
    if (behavior == SplitBehavior::kRemoved) {
      if (!is_match) emit(begin, end);
      return;
    }
    bool joins = false;
    switch (behavior) {
      case SplitBehavior::kMergedWithPrevious:
        joins = is_match && !previous_is_match;
        break;
      case SplitBehavior::kMergedWithNext:
        joins = held_is_match && !is_match;
        break;
      default:
        joins = is_match == previous_is_match;
        break;
    }
    joins = joins && has_held;
    if (!joins) {
      if (has_held) emit(held_begin, held_end);
      held_begin = begin;
    }
    held_end = end;
    held_is_match = is_match && !joins;
    has_held = true;
    previous_is_match = is_match;
  };
  for_each_match(piece.text, [&](std::size_t begin, std::size_t end) {
    if (covered < begin) next(covered, begin, is_inverted);
    next(begin, end, !is_inverted);
    covered = end;
  });
  if (covered < piece.text.size()) next(covered, piece.text.size(), is_inverted);
  if (has_held) emit(held_begin, held_end);
}

template <typename Sink>
void PreTokenizer::Stage::apply(const TextView& piece, bool keep_origin, StageBuffers& buffers,
                                Sink&& sink) const {
  const auto pattern_matches = [this](std::string_view text, auto&& found) {
    pattern->for_each_match(text, found);
  };
  switch (kind) {
    case Kind::kSplit:
      cut(piece, pattern_matches, sink);
      return;
    case Kind::kSplitCodePoints:
      cut(
          piece,
          [this](std::string_view text, auto&& found) {
            for (std::size_t i = 0; i < text.size();) {
              const utf8::Decoded c = utf8::decode(text.data() + i);
              if (set.contains(c.code_point)) found(i, i + c.length);
              i += c.length;
            }
          },
          sink);
      return;
    case Kind::kWords: {
      // 0: blank, 1: word character, 2: anything else
      std::size_t begin = 0;
      int current = 0;
      const std::string_view text = piece.text;
      for (std::size_t i = 0; i < text.size();) {
        const utf8::Decoded c = utf8::decode(text.data() + i);
        const int next = set.contains(c.code_point) ? 1 : is_space(c.code_point) ? 0 : 2;
        if (next != current) {
          if (current != 0) sink(piece.part(begin, i));
          begin = i;
          current = next;
        }
        i += c.length;
      }
      if (current != 0) sink(piece.part(begin, text.size()));
      return;
    }
    case Kind::kByteLevel: {
      TextView source = piece;
      if (adds_prefix_space && !piece.text.starts_with(' ')) {
        buffers.whole.reset(keep_origin);
        buffers.whole.put(" ", piece.origin_of(0));
        buffers.whole.copy(piece, 0, piece.text.size());
        source = buffers.whole.view();
      }
      const auto spell = [&](const TextView& word) {
        if (!spells_bytes) return sink(word);
        buffers.word.reset(keep_origin);
        spell_bytes(word, buffers.word);
        sink(buffers.word.view());
      };
      if (!uses_pattern) return spell(source);
      cut(source, pattern_matches, spell);
      return;
    }
    case Kind::kMetaspace: {
      TextBuffer& text = buffers.whole;
      text.reset(keep_origin);
      const bool has_prefix = piece.text.starts_with(replacement) || piece.text.starts_with(' ');
      if (!has_prefix && (prepend == Prepend::kAlways ||
                          (prepend == Prepend::kFirst && piece.origin_of(0).begin == 0))) {
        text.put(replacement, piece.origin_of(0));
      }
      std::size_t copied = 0;
      for (std::size_t at = 0; (at = piece.text.find(' ', at)) != std::string_view::npos; ++at) {
        text.copy(piece, copied, at);
        text.put(replacement, piece.origin_of(at));
        copied = at + 1;
      }
      text.copy(piece, copied, piece.text.size());
      const TextView rewritten = text.view();
      if (!splits) return sink(rewritten);
      std::size_t begin = 0;
      for (std::size_t at = 1;
           (at = rewritten.text.find(replacement, at)) != std::string_view::npos; ++at) {
        sink(rewritten.part(begin, at));
        begin = at;
      }
      sink(rewritten.part(begin, rewritten.text.size()));
      return;
    }
    case Kind::kFixedLength: {
      std::size_t begin = 0;
      std::size_t count = 0;
      for (std::size_t i = 0; i < piece.text.size();) {
        i += utf8::sequence_length(piece.text[i]);
        if (++count == length || i == piece.text.size()) {
          sink(piece.part(begin, i));
          begin = i;
          count = 0;
        }
      }
      return;
    }
  }
}

}  // namespace tessera
