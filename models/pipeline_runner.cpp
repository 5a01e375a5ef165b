#include "models/pipeline_runner.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {

PipelineRunner::PipelineRunner(Transformer& model, Communicator& pipeline, Stream& compute,
                               Stream& transfer, const PipelineShape& shape)
    : model_(&model),
      pipeline_(&pipeline),
      compute_(&compute),
      transfer_(&transfer),
      shape_(shape),
      buffers_(buffers(shape, pipeline.rank())) {
  const auto make_events = [&](std::vector<std::unique_ptr<Event>>& events, int count) {
    for (int i = 0; i < count; ++i) events.push_back(compute.context().make_event());
  };
  make_events(inputs_moved_, buffers_.inputs);
  make_events(outputs_moved_, buffers_.outputs);
  make_events(gradients_moved_, buffers_.gradients);
  computed_ = compute.context().make_event();
  all_moved_ = compute.context().make_event();
  schedule(shape.micro_batches);
}

PipelineBuffers PipelineRunner::buffers(const PipelineShape& shape, int rank) {
  PipelineBuffers result = pipeline_buffers(shape, rank);
  if (shape.stages > 1) {
    const bool is_always_first = rank == 0 && shape.chunks == 1;
    const bool is_always_last = rank + 1 == shape.stages && shape.chunks == 1;
    if (!is_always_first) result.inputs = std::max(result.inputs, 1);
    if (!is_always_last) result.outputs = std::max(result.outputs, 1);
  }
  return result;
}

const PipelineSchedule& PipelineRunner::schedule(int count) {
  const auto found = schedules_.find(count);
  if (found != schedules_.end()) return found->second;
  PipelineShape shape = shape_;
  shape.micro_batches = count;
  PipelineSchedule made = pipeline_schedule(shape, pipeline_->rank());
  const PipelineBuffers& needed = made.buffers;
  bool fits = needed.inputs <= buffers_.inputs && needed.outputs <= buffers_.outputs &&
              needed.gradients <= buffers_.gradients && needed.batches <= buffers_.batches;
  for (std::size_t chunk = 0; chunk < needed.activations.size(); ++chunk) {
    fits = fits && needed.activations[chunk] <= buffers_.activations[chunk];
  }
  CHECK(fits, "[pipeline] {} micro-batches need more buffers than {} do", count,
        shape_.micro_batches);
  return schedules_.emplace(count, std::move(made)).first->second;
}

void PipelineRunner::await(const std::vector<std::unique_ptr<Event>>& events, int buffer) {
  if (has_two_streams() && buffer >= 0) compute_->wait(*events[static_cast<std::size_t>(buffer)]);
}

void PipelineRunner::exchange(const PipelineAction& action) {
  if (has_two_streams()) {
    // What is sent is complete, and what is received replaces what has been read.
    compute_->record(*computed_);
    transfer_->wait(*computed_);
  }
  {
    const GroupScope group(*pipeline_);
    for (const PipelineTransfer& t : action.transfers) {
      if (t.is_send) {
        pipeline_->send(
            t.is_gradient ? model_->gradient_buffer(t.buffer) : model_->output_buffer(t.buffer),
            t.peer, *transfer_);
      } else {
        pipeline_->recv(
            t.is_gradient ? model_->gradient_buffer(t.buffer) : model_->input_buffer(t.buffer),
            t.peer, *transfer_);
      }
    }
  }
  if (!has_two_streams()) return;
  for (const PipelineTransfer& t : action.transfers) {
    const auto& events = t.is_gradient ? gradients_moved_
                         : t.is_send   ? outputs_moved_
                                       : inputs_moved_;
    transfer_->record(*events[static_cast<std::size_t>(t.buffer)]);
  }
}

void PipelineRunner::run(int count, const std::vector<DeviceBatch>& batches, const Load& load,
                         const Tensor& loss_sum, LayerContext& context) {
  for (const PipelineAction& action : schedule(count).actions) {
    if (action.kind == PipelineAction::Kind::kExchange) {
      exchange(action);
      continue;
    }
    const DeviceBatch& batch = batches.at(static_cast<std::size_t>(action.batch));
    if (action.starts) load(action.micro_batch, batch);
    const bool is_last = action.micro_batch + 1 == count;
    const auto bucket_done = [&](int bucket) { context.sync.gradients_ready(bucket, is_last); };
    await(gradients_moved_, action.gradient);
    if (action.kind == PipelineAction::Kind::kForward) {
      await(inputs_moved_, action.input);
      await(outputs_moved_, action.output);
      model_->forward(action, batch, loss_sum, context, bucket_done);
    } else {
      model_->backward(action, batch, context, bucket_done);
    }
  }
  if (!has_two_streams()) return;
  transfer_->record(*all_moved_);
  compute_->wait(*all_moved_);
}

void PipelineRunner::evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                              LayerContext& context) {
  const int size = pipeline_->size();
  const int rank = pipeline_->rank();
  for (int chunk = 0; chunk < model_->num_chunks(); ++chunk) {
    const StagePiece& piece = model_->piece(chunk);
    if (!piece.has_embedding) {
      pipeline_->recv(model_->input_buffer(0), (rank + size - 1) % size, *compute_);
    }
    model_->evaluate_chunk(chunk, batch, loss_sum, nll, context);
    if (!piece.has_head) {
      pipeline_->send(model_->output_buffer(0), (rank + 1) % size, *compute_);
    }
  }
}

}  // namespace tessera
