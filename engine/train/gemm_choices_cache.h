// The algorithms of matrix products between runs: timed once for a kind of GPU and version of the
// library and kept in the user's cache folder, so that later runs make the same choices, and the
// same bits, without timing anything.
#pragma once

#include <filesystem>
#include <string>

#include "engine/device/context.h"

namespace tessera {

class GemmChoicesCache {
 public:
  // Takes over what is kept for `context` and this rank: under $XDG_CACHE_HOME/tessera/gemm, else
  // ~/.cache/tessera/gemm. Each rank keeps its own, for ranks time apart. Damaged files are left
  // aside with a warning. Without effect on other devices than cuda.
  GemmChoicesCache(BackendContext& context, int rank);

  // Writes the choices made since; a folder that cannot be written costs a warning, not the run.
  void save();

 private:
  BackendContext* context_;
  std::filesystem::path path_;  // empty: nothing is kept
  std::string kept_;
};

}  // namespace tessera
