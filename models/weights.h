// Getting weights into and out of a ParamStore: random values, Hugging Face safetensors, and the
// named state that checkpoints hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/named_state.h"
#include "checkpoint/safetensors_folder.h"
#include "models/hf/names.h"
#include "models/model_runtime.h"

namespace tessera {

// Fills this rank's shards with the values of `seed`: each parameter from its own key, each element
// from its global index, so that every layout starts with the same numbers. Ends with
// refresh_weights.
void initialize_random(ModelRuntime& runtime, std::uint64_t seed);

// Rows of the embedding and of the output matrix for tokens that the model in the file does not
// know. They start as the mean of the rows that it does: a new token is then as likely as an
// average one, and the others keep their order (Hewitt, "Initializing new word embeddings for
// pretrained language models", 2021).
struct AddedRows {
  std::int64_t rows_in_file = 0;  // of the vocabulary's tensors; the rows behind are new
  std::int64_t known_rows = 0;    // new rows are the mean of the file's rows [0, known_rows)
  std::vector<std::int64_t>
      rows;  // rows of the file that count as new, too: spares without a token
};

// Reads this rank's shards from a Hugging Face folder; `names` is the result of match_hf_tensors,
// which has checked the folder against the config (with added.rows_in_file as its vocabulary, where
// rows are added). Only the slices that this rank owns are read. Ends with refresh_weights.
void load_weights(ModelRuntime& runtime, const SafetensorsFolder& folder, const HfNameMap& names,
                  const AddedRows* added = nullptr);

// Rounds the exact values to the compute format and gathers the shards of other ranks. Called after
// the exact values were written by other means (a checkpoint). Where parameter_state() has given out
// an image of 8-bit moments, they take what it holds.
void refresh_weights(ModelRuntime& runtime);

// Converts `count` host elements between floating types, rounding once to nearest even.
void convert_elements(const void* from, DType from_dtype, void* to, DType to_dtype,
                      std::int64_t count);

// What a checkpoint saves of the parameters: "weight/NAME" (the exact values) and, when training,
// "adam_m/NAME" and "adam_v/NAME". Views of the runtime's memory, valid until the next update; of
// 8-bit moments, views of a bf16 image of them, which this call brings up to date (it blocks) and
// refresh_weights() takes back.
std::vector<NamedState> parameter_state(ModelRuntime& runtime);

}  // namespace tessera
