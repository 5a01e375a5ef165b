#include "engine/train/export.h"

#include <algorithm>
#include <cstring>
#include <functional>
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

// Finds a parameter by name in the store's buckets.
ParamId find_parameter(const ParamStore& params, const std::string& name) {
  for (int b = 0; b < params.num_buckets(); ++b) {
    const auto& specs = params.bucket(b).params;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return {b, static_cast<int>(i)};
    }
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[export] the model has no parameter {}", name);
}

// Brings the pieces of a parameter together, a bounded part at a time, on every rank of the tensor
// group.
class ParameterGatherer {
 public:
  explicit ParameterGatherer(ModelRuntime& runtime) : runtime_(&runtime) {}

  // Calls write(data, elements) with the parameter's values in row-major order.
  void gather(ParamId id, const std::function<void(const void*, std::int64_t)>& write) {
    const ParamStore& params = runtime_->params();
    const ParamSpec& spec = params.spec(id);
    const Tensor local = params.weight(id);
    Communicator& group = runtime_->mesh().tensor();
    const LocalExtent own = local_extent(spec, group.size(), group.rank());
    const std::int64_t width = own.storage_cols;
    const auto element = static_cast<std::int64_t>(size_of(local.dtype));
    const std::int64_t step = std::max<std::int64_t>(1, kPieceBytes / (width * element));
    const Tensor flat = local.reshape(Shape{local.numel()});
    const bool is_column_split =
        spec.placement.kind == Placement::Kind::kSharded && spec.placement.dim == 1;
    if (is_column_split) {
      for (std::int64_t row = 0; row < own.rows; row += step) {
        const std::int64_t count = std::min(step, own.rows - row);
        const Tensor pieces = buffer(group.size() * count * width, local.dtype);
        group.all_gather(flat.flat_slice(row * width, count * width), pieces, runtime_->compute());
        download(pieces);
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
        const Tensor piece = buffer(count, local.dtype);
        if (group.rank() == owner) {
          copy_tensor(flat.flat_slice(row * width, count), piece, runtime_->compute());
        }
        group.broadcast(piece, owner, runtime_->compute());
        download(piece);
        write(host_.data(), count);
      }
    }
  }

 private:
  Tensor buffer(std::int64_t elements, DType dtype) {
    const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
    if (memory_.bytes() < bytes) memory_ = Buffer(runtime_->context(), bytes);
    return Tensor(memory_.data(), dtype, Shape{elements}, runtime_->context().device());
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
  Buffer memory_;
  std::vector<char> host_;
  std::vector<char> interleaved_;
};

}  // namespace

void export_model(ModelRuntime& runtime, const ExportSettings& settings) {
  const ModelConfig& config = runtime.model().config();
  const ProcessMesh& mesh = runtime.mesh();
  const bool takes_part = mesh.data_context().rank() == 0;
  const bool writes = takes_part && mesh.tensor().rank() == 0;
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
  ParameterGatherer gatherer(runtime);
  std::vector<char> converted;
  for (const HfTensor& tensor : hf_tensors(config)) {
    const ParamId id = find_parameter(runtime.params(), tensor.name);
    const WeightLease lease = runtime.sync().acquire(id.bucket);  // with all that share it
    if (!takes_part) continue;
    const DType stored = runtime.params().weight(id).dtype;
    gatherer.gather(id, [&](const void* data, std::int64_t count) {
      if (!writes) return;
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
