#include "engine/train/export.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "checkpoint/posix_file.h"
#include "checkpoint/safetensors_writer.h"
#include "engine/core/error.h"
#include "models/hf/names.h"
#include "models/weights.h"

namespace tessera {
namespace {

constexpr std::int64_t kPieceBytes = std::int64_t{32} << 20;

// Finds a parameter by name, other than another stage's copy; undefined where a stage has not got
// it.
ParamId find_parameter(const ParamStore& params, const std::string& name) {
  for (int b = 0; b < params.num_buckets(); ++b) {
    const auto& specs = params.bucket(b).params;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name && !specs[i].is_copy) return {b, static_cast<int>(i)};
    }
  }
  return {};
}

// Brings the pieces of a parameter together, a bounded part at a time: on the tensor group of the
// stage that holds it, and from there on the first rank of the first stage.
class ParameterGatherer {
 public:
  ParameterGatherer(ModelRuntime& runtime, DType dtype) : runtime_(&runtime), dtype_(dtype) {}

  // On ranks of the stages `stage` and 0. `local` is this rank's piece, undefined if it has none.
  // On the first rank of all calls write(data, elements) with the values in row-major order.
  void gather(const ParamSpec& spec, const Tensor& local, int stage,
              const std::function<void(const void*, std::int64_t)>& write) {
    Communicator& group = runtime_->mesh().tensor();
    const LocalExtent own = local_extent(spec, group.size(), group.rank());
    const std::int64_t width = own.storage_cols;
    const auto element = static_cast<std::int64_t>(size_of(dtype_));
    const std::int64_t step = std::max<std::int64_t>(1, kPieceBytes / (width * element));
    const bool holds = local.defined();
    const Tensor flat = holds ? local.reshape(Shape{local.numel()}) : Tensor{};
    const bool is_column_split =
        spec.placement.kind == Placement::Kind::kSharded && spec.placement.dim == 1;
    if (is_column_split) {
      for (std::int64_t row = 0; row < own.rows; row += step) {
        const std::int64_t count = std::min(step, own.rows - row);
        const Tensor pieces = buffer(group.size() * count * width);
        if (holds) {
          group.all_gather(flat.flat_slice(row * width, count * width), pieces,
                           runtime_->compute());
        }
        if (!deliver(pieces, stage)) continue;
        write(interleave(spec, count, width * element, element), count * spec.shape[1]);
      }
      return;
    }
    // Whole rows: each piece comes from the first rank that holds it.
    for (int owner = 0; owner < group.size(); ++owner) {
      const LocalExtent extent = local_extent(spec, group.size(), owner);
      if (extent.copy != 0) continue;
      for (std::int64_t row = 0; row < extent.rows; row += step) {
        const std::int64_t count = std::min(step, extent.rows - row) * width;
        const Tensor piece = buffer(count);
        if (holds && group.rank() == owner) {
          copy_tensor(flat.flat_slice(row * width, count), piece, runtime_->compute());
        }
        if (holds) group.broadcast(piece, owner, runtime_->compute());
        if (deliver(piece, stage)) write(host_.data(), count);
      }
    }
  }

 private:
  Tensor buffer(std::int64_t elements) {
    const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype_);
    if (memory_.bytes() < bytes) memory_ = Buffer(runtime_->context(), bytes);
    return Tensor(memory_.data(), dtype_, Shape{elements}, runtime_->context().device());
  }
  // Brings what the tensor group of `stage` has in `tensor` to the first rank of all, and there to
  // host_: true on that rank.
  bool deliver(const Tensor& tensor, int stage) {
    Communicator& pipeline = runtime_->mesh().pipeline();
    if (runtime_->mesh().tensor().rank() == 0 && stage > 0) {
      if (pipeline.rank() == stage) pipeline.send(tensor, 0, runtime_->compute());
      if (pipeline.rank() == 0) pipeline.recv(tensor, stage, runtime_->compute());
    }
    if (runtime_->mesh().tensor().rank() != 0 || pipeline.rank() != 0) {
      runtime_->compute().synchronize();  // the buffer is used again
      return false;
    }
    download(tensor);
    return true;
  }
  void download(const Tensor& tensor) {
    host_.resize(tensor.bytes());
    runtime_->compute().copy_bytes(host_.data(), tensor.data, host_.size());
    runtime_->compute().synchronize();
  }
  // host_ holds [rank][row][storage column]; the result is [row][global column].
  const char* interleave(const ParamSpec& spec, std::int64_t rows, std::int64_t row_bytes,
                         std::int64_t element) {
    const int ranks = runtime_->mesh().tensor().size();
    interleaved_.resize(static_cast<std::size_t>(rows * spec.shape[1] * element));
    for (int rank = 0; rank < ranks; ++rank) {
      const LocalExtent extent = local_extent(spec, ranks, rank);
      for (std::int64_t r = 0; r < rows; ++r) {
        std::memcpy(interleaved_.data() + (r * spec.shape[1] + extent.col_begin) * element,
                    host_.data() + (rank * rows + r) * row_bytes,
                    static_cast<std::size_t>(extent.cols * element));
      }
    }
    return interleaved_.data();
  }

  ModelRuntime* runtime_;
  DType dtype_;
  Buffer memory_;
  std::vector<char> host_;
  std::vector<char> interleaved_;
};

// The pipeline stage that holds a parameter: of a block, of the first or of the last.
int stage_holding(const std::string& name, const std::vector<int>& stage_of_layer) {
  for (std::size_t layer = 0; layer < stage_of_layer.size(); ++layer) {
    if (name.starts_with(layer_prefix(static_cast<std::int64_t>(layer))))
      return stage_of_layer[layer];
  }
  return name == kEmbeddingName ? stage_of_layer.front() : stage_of_layer.back();
}

}  // namespace

void export_model(ModelRuntime& runtime, const ExportSettings& settings) {
  const ModelConfig& config = runtime.model().config();
  const ProcessMesh& mesh = runtime.mesh();
  const int stage = mesh.pipeline().rank();
  const bool takes_part = mesh.data_context().rank() == 0;
  const bool writes = takes_part && mesh.tensor().rank() == 0 && stage == 0;
  std::string failure;
  std::unique_ptr<SafetensorsFolderWriter> writer;
  const auto attempt = [&](const std::function<void()>& action) {
    // The first rank's disk error must not leave the others alone in a collective: it is kept
    // until all pieces have been exchanged.
    if (!failure.empty()) return;
    try {
      action();
    } catch (const Error& error) {
      failure = error.what();
    }
  };
  if (writes) {
    attempt([&] {
      create_folders(settings.folder, "export");
      writer = std::make_unique<SafetensorsFolderWriter>(settings.folder,
                                                         export_specs(config, settings.dtype));
    });
  }
  // What every rank knows of all stages' parameters.
  const RuntimeOptions& options = runtime.options();
  const Transformer whole(config, mesh.tensor().size(), options.sequence_parallel);
  const std::vector<int> stage_of_layer = stages_of_layers(
      config, mesh.pipeline().size(), options.pipeline.chunks, options.geometry.max_length);
  const DType stored = options.params.compute;
  ParameterGatherer gatherer(runtime, stored);
  std::vector<char> converted;
  std::map<std::string, const ParamSpec*> specs;
  for (const BucketSpec& bucket : whole.registry().buckets()) {
    for (const ParamSpec& spec : bucket.params) specs[spec.name] = &spec;
  }
  // The bucket that is gathered apart, where weights are gathered as codes.
  int exact_bucket = -1;
  Tensor exact;
  for (const HfTensor& tensor : hf_tensors(config)) {
    const ParamId id = find_parameter(runtime.params(), tensor.name);
    const int holder = stage_holding(tensor.name, stage_of_layer);
    CHECK(id.defined() == (holder == stage), "[export] stage {} was to hold {}", holder,
          tensor.name);
    // With all that share it.
    WeightLease lease;
    Tensor local;
    if (id.defined() && runtime.params().gathers_codes(id.bucket)) {
      if (exact_bucket != id.bucket) exact = runtime.sync().gather_exact(id.bucket);
      exact_bucket = id.bucket;
      local = runtime.params().weight_in(exact, id);
    } else if (id.defined()) {
      lease = runtime.sync().acquire(id.bucket);
      local = runtime.params().weight(id);
    }
    if (!takes_part || (holder != stage && stage != 0)) continue;
    gatherer.gather(*specs.at(tensor.name), local, holder,
                    [&](const void* data, std::int64_t count) {
                      attempt([&] {
                        converted.resize(static_cast<std::size_t>(count) * size_of(settings.dtype));
                        convert_elements(data, stored, converted.data(), settings.dtype, count);
                        writer->write(tensor.name, converted.data(), converted.size());
                      });
                    });
  }
  if (writes) {
    attempt([&] {
      write_hf_config(settings.folder, config, settings.source);
      if (settings.tokenizer != nullptr) settings.tokenizer->save(settings.folder);
      writer->commit();
    });
  }
  if (!failure.empty()) TESSERA_FAIL(ErrorKind::kTransient, "{}", failure);
  mesh.world().barrier();
}

}  // namespace tessera
