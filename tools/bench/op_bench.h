// Every op on GPU 0 at the shapes of a model's training step: time, rate and share of the ceiling
// of the same run, over arguments that do not come from the cache. Bytes are the minimum of the
// formula: each input read once, each output written once.
#pragma once

#include <string>

namespace tessera {

// `model`: 1b or 8b; `filter`: a part of the op's name, or empty. Prints a table to stdout. kUser
// without a GPU. `autotune`: see ContextOptions::autotune_gemm.
void bench_ops(const std::string& model, const std::string& filter, bool autotune);

}  // namespace tessera
