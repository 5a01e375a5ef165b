#include "engine/train/evaluator.h"

#include <algorithm>

#include "engine/core/error.h"
#include "models/weights.h"

namespace tessera {

double EvaluationResult::loss() const {
  CHECK_USER(target_tokens > 0, "[eval] no token of the data is a target: there is no loss to report");
  return loss_sum / static_cast<double>(target_tokens);
}

namespace {

// The first `tokens` of a micro-batch from what its ranks hold, one behind the other.
void append_in_order(const std::vector<double>& held, const ContextSplit& split,
                     std::int64_t tokens, std::vector<double>& to) {
  std::vector<double> whole(held.size());
  for (int rank = 0; rank < split.size(); ++rank) {
    split.for_each_piece(rank, [&](std::int64_t place, std::int64_t own, std::int64_t count) {
      std::copy_n(held.begin() + rank * split.tokens() + own, count, whole.begin() + place);
    });
  }
  to.insert(to.end(), whole.begin(), whole.begin() + tokens);
}

}  // namespace

EvaluationResult evaluate(ModelRuntime& runtime, BatchUploader& uploader, DataLoader& loader,
                          std::optional<std::int64_t> max_batches, bool wants_token_losses) {
  Stream& stream = runtime.compute();
  EvaluationResult result;
  Communicator& pipeline = runtime.mesh().pipeline();
  stream.set_zero(runtime.totals().data, runtime.totals().bytes());
  double target_tokens = 0;
  std::int64_t count = loader.steps_per_epoch();
  if (max_batches) count = std::min(count, *max_batches);
  std::vector<char> raw(runtime.nll().bytes());
  for (std::int64_t i = 0; i < count; ++i) {
    const MicroBatch batch = loader.load(i, 0);
    target_tokens += static_cast<double>(uploader.upload(batch, runtime.batch()));
    runtime.evaluate(wants_token_losses);
    if (!wants_token_losses) continue;
    if (pipeline.size() > 1) pipeline.broadcast(runtime.nll(), pipeline.size() - 1, stream);
    stream.copy_bytes(raw.data(), runtime.nll().data, raw.size());
    stream.synchronize();
    std::vector<double> losses(static_cast<std::size_t>(runtime.nll().numel()));
    convert_elements(raw.data(), runtime.nll().dtype, losses.data(), DType::kF64, runtime.nll().numel());
    append_in_order(losses, ContextSplit(runtime.options().geometry.tokens,
                                         runtime.mesh().context().size()),
                    batch.tokens(), result.token_losses);
  }
  const Tensor denominator = runtime.totals().flat_slice(1, 1);
  stream.copy_bytes(denominator.data, &target_tokens, sizeof target_tokens);
  runtime.sum_totals();
  double totals[2] = {0, 0};
  stream.copy_bytes(totals, runtime.totals().data, sizeof totals);
  stream.synchronize();
  result.loss_sum = totals[0];
  result.target_tokens = static_cast<std::int64_t>(totals[1]);
  return result;
}

void dry_run_evaluation(ModelRuntime& runtime) {
  runtime.evaluate(true);
  runtime.sum_totals();
}

}  // namespace tessera
