// Tokenised data written for keeping: token files of ours, or Megatron-LM's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "data/dataset.h"

namespace tessera {

enum class TokenFileKind {
  kTessera,   // PREFIX.tokens, .docs, .json and, with labels, .mask
  kMegatron,  // PREFIX.bin and .idx; labels cannot be kept
};

struct ExportCounts {
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

// All documents of the sources, one behind the other. Ids take two bytes where all of them fit.
// Throws kUser for labels that the format cannot hold or that are read in two ways, and kTransient
// for a full disk.
ExportCounts export_tokens(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                           const std::filesystem::path& prefix, TokenFileKind kind);

}  // namespace tessera
