// The normalizer of a tokenizer.json: a chain of rewriting steps applied to the text between added
// tokens that are matched as they stand.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string_view>
#include <vector>

#include "data/tokenizer/text_view.h"

namespace tessera {

class NormalizerStep;

class Normalizer {
 public:
  // Two buffers that the steps write into by turns.
  struct Scratch {
    TextBuffer buffers[2];
  };

  Normalizer();  // changes nothing
  // `spec` is the file's "normalizer" (may be null). Throws kUser naming `file` and the part if it
  // is not supported.
  Normalizer(const nlohmann::json& spec, std::string_view file);
  ~Normalizer();
  Normalizer(Normalizer&&) noexcept;
  Normalizer& operator=(Normalizer&&) noexcept;

  bool is_identity() const { return steps_.empty(); }

  // The normal form of `text`, valid until `scratch` is used again; `text` itself where nothing
  // changes. Origins are kept if `keep_origin`.
  TextView apply(const TextView& text, bool keep_origin, Scratch& scratch) const;

 private:
  std::vector<std::unique_ptr<NormalizerStep>> steps_;
};

}  // namespace tessera
