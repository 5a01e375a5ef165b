// The algorithms that matrix products use on a GPU, as text: kept on disk and in checkpoints, so that a
// later run on the same kind of GPU and library makes the same choices (and the same bits) without timing
// anything. Empty on other devices.
#pragma once

#include <string>

#include "engine/device/context.h"

namespace tessera {

// Every choice made or imported so far: JSON {"gpu", "library", "choices": {shape: algorithm}}.
std::string export_gemm_choices(BackendContext& context);

// Takes over the choices of an export; shapes met already keep theirs. Text of another GPU or library
// version is left aside with a note; text that is no export is a kUser error. Returns the number taken.
int import_gemm_choices(BackendContext& context, const std::string& text);

namespace cuda {
std::string export_gemm_choices(BackendContext& context);
int import_gemm_choices(BackendContext& context, const std::string& text);
}  // namespace cuda

}  // namespace tessera
