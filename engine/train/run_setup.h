// RunSetup: everything that a run decides before it allocates memory — the model, the layout, the
// data, the length and the memory plan. `train`, `train --dry-run` and `plan` share it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "data/prepare.h"
#include "data/tokenizer/tokenizer.h"
#include "engine/device/context.h"
#include "engine/train/optimizer.h"
#include "engine/train/run_config.h"
#include "engine/train/schedule.h"
#include "models/hf/config_io.h"
#include "models/model_runtime.h"
#include "parallel/mesh.h"

namespace tessera {

// The tokenizer that data.tokenizer names, else the model's own, else none (pre-tokenised data
// only), with the tokens of data.add_tokens.
struct RunTokenizer {
  std::optional<TextEncoder> encoder;
  std::shared_ptr<const Tokenizer> tokenizer;  // what the encoder uses; null without one
  std::string source;                          // folder or file it was read from, "bytes", or empty
  std::int64_t known_size = 0;                 // ids before data.add_tokens were below this
  std::vector<std::int64_t> new_ids;  // of data.add_tokens, those not known before; ascending
};
RunTokenizer load_run_tokenizer(const RunConfig& config);
// The same from its parts: `source` as in RunTokenizer.
RunTokenizer load_tokenizer(const std::string& source, const std::vector<std::string>& add_tokens);

// The model of a run: config.json under model.path, checked, with rows for the tokens of
// data.add_tokens.
HfConfig load_run_model(const RunConfig& config, const RunTokenizer& tokenizer);

// Fills the weights from the model's folder; rows of new tokens start as the mean of the others.
// `checks_duplicates`: of a tied model, one rank compares (TiedDuplicate). Returns what the names
// of the file were understood as, a sentence each.
std::vector<std::string> load_pretrained_weights(ModelRuntime& runtime, const RunConfig& config,
                                                 const RunTokenizer& tokenizer,
                                                 bool checks_duplicates);

// The mesh that the configuration asks of `ranks` ranks, `ranks_per_node` of them on each node (0:
// all on one); kUser where it does not fit.
// Documents in a micro-batch, guessed where no data says: they decide a few bytes of a plan only.
std::int64_t guessed_documents(const RunConfig& config);

MeshShape mesh_shape(const RunConfig& config, std::int64_t ranks, std::int64_t ranks_per_node = 0);

// What the runtime needs to know, apart from how much is recomputed. `config` is resolved.
RuntimeOptions runtime_options(const RunConfig& config, const MeshShape& mesh,
                               std::int64_t max_documents);

// Every call of a step on the meta device, so that memory() covers the whole run.
void dry_run_step(ModelRuntime& runtime, const AdamWSettings& adamw);

AdamWSettings adamw_settings(const OptimizerOptions& options);

// Floating-point operations of forward and backward per token: 6 per parameter in a matrix product
// (head included, embedding lookup not) and causal attention over half of the square.
double flops_per_token(const ModelConfig& model, std::int64_t sequence_length);

}  // namespace tessera
