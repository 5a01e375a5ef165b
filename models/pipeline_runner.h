// PipelineRunner: carries out a rank's PipelineSchedule on a Transformer. A pipeline of one rank is
// the plain loop over micro-batches.
//
// Messages travel on a stream of their own, ordered with the computation by events: an exchange
// starts when what it sends has been computed, and computation waits for a message only where it
// reads it. The host never waits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "models/transformer.h"
#include "parallel/communicator.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

class PipelineRunner {
 public:
  // `transfer` may be the compute stream itself. `shape.micro_batches` is the most that run() gets:
  // its schedule's buffers are those to plan(). All references outlive the runner.
  PipelineRunner(Transformer& model, Communicator& pipeline, Stream& compute, Stream& transfer,
                 const PipelineShape& shape);

  // What the schedule needs, and one input and output for evaluate().
  static PipelineBuffers buffers(const PipelineShape& shape, int rank);

  // Enqueues the copy of micro-batch `index` of the step into `target` on the compute stream.
  using Load = std::function<void(int index, const DeviceBatch& target)>;

  // Forward and backward of `count` micro-batches; reports gradients to context.sync. `batches` has
  // buffers().batches entries. The loss is added to loss_sum [1] fp64 on the last rank.
  void run(int count, const std::vector<DeviceBatch>& batches, const Load& load,
           const Tensor& loss_sum, LayerContext& context);
  // Forward alone of `batch`: loss_sum and nll as in Transformer::evaluate_chunk, on the last rank.
  void evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                LayerContext& context);

 private:
  const PipelineSchedule& schedule(int count);
  void exchange(const PipelineAction& action);
  bool has_two_streams() const { return transfer_ != compute_; }
  void await(const std::vector<std::unique_ptr<Event>>& events, int buffer);

  Transformer* model_;
  Communicator* pipeline_;
  Stream* compute_;
  Stream* transfer_;
  PipelineShape shape_;
  PipelineBuffers buffers_;
  std::map<int, PipelineSchedule> schedules_;  // by the number of micro-batches
  // The last transfer from or to each buffer.
  std::vector<std::unique_ptr<Event>> inputs_moved_;
  std::vector<std::unique_ptr<Event>> outputs_moved_;
  std::vector<std::unique_ptr<Event>> gradients_moved_;
  std::unique_ptr<Event> computed_;
  std::unique_ptr<Event> all_moved_;
};

}  // namespace tessera
