// What the command tests train on: a small model and a text.
#pragma once

#include <fmt/core.h>

#include <string>

#include "tests/support/temp_folder.h"

namespace tessera::test {

// Writes model.json (a tied Llama of 264 bytes and specials, 4 heads) and text.txt (120 lines).
inline void write_model_and_text(const TempFolder& folder) {
  folder.write("model.json", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
      "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": true,
      "hidden_act": "silu", "torch_dtype": "float32"})");
  std::string text;
  for (int i = 0; i < 120; ++i)
    text += fmt::format("Line {} says that {} is the square.\n", i, i * i);
  folder.write("text.txt", text);
}

}  // namespace tessera::test
