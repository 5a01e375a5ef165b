// The loss of a runtime's weights on data, without a backward.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/loader.h"
#include "engine/train/batch_uploader.h"

namespace tessera {

struct EvaluationResult {
  double loss_sum = 0;
  std::int64_t target_tokens = 0;
  // Of every token of every row, 0 where nothing is predicted.
  std::vector<double> token_losses;
  // kUser where no token was a target: there is no loss to report.
  double loss() const;
};

// Collective over the mesh: every row of the loader once, or the first `max_batches` global batches;
// sums are over all ranks, token losses (if wanted) of this rank's rows. Blocks.
EvaluationResult evaluate(ModelRuntime& runtime, BatchUploader& uploader, DataLoader& loader,
                          std::optional<std::int64_t> max_batches, bool wants_token_losses = false);

// The calls of an evaluation, for measuring its memory.
void dry_run_evaluation(ModelRuntime& runtime);

}  // namespace tessera
