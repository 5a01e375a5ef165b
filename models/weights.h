// Getting weights into and out of a ParamStore: random values, Hugging Face safetensors, and the named
// state that checkpoints hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/named_state.h"
#include "checkpoint/safetensors_folder.h"
#include "models/hf/names.h"
#include "models/model_runtime.h"

namespace tessera {

// Fills this rank's shards with the values of `seed`: each parameter from its own key, each element from
// its global index, so that every layout starts with the same numbers. Ends with refresh_weights.
void initialize_random(ModelRuntime& runtime, std::uint64_t seed);

// Reads this rank's shards from a Hugging Face folder; `names` is the result of match_hf_tensors, which
// has checked the folder against the config. Only the slices that this rank owns are read. Ends with
// refresh_weights.
void load_weights(ModelRuntime& runtime, const SafetensorsFolder& folder, const HfNameMap& names);

// Rounds the exact values to the compute format and gathers the shards of other ranks. Called after
// the exact values were written by other means (a checkpoint).
void refresh_weights(ModelRuntime& runtime);

// Converts `count` host elements between floating types, rounding once to nearest even.
void convert_elements(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t count);

// What a checkpoint saves of the parameters: "weight/NAME" (the exact values) and, when training,
// "adam_m/NAME" and "adam_v/NAME". Views of the runtime's memory.
std::vector<NamedState> parameter_state(ModelRuntime& runtime);

}  // namespace tessera
