#include "models/weights.h"

#include <algorithm>
#include <functional>
#include <map>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Bytes of one piece on its way between file and device.
constexpr std::int64_t kStagingBytes = std::int64_t{64} << 20;

template <typename From, typename To>
void convert(const void* from, void* to, std::int64_t count) {
  const auto* in = static_cast<const From*>(from);
  auto* out = static_cast<To*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<From, double> && std::is_same_v<To, double>) {
      out[i] = in[i];
    } else if constexpr (std::is_same_v<From, double>) {
      out[i] = static_cast<To>(static_cast<float>(in[i]));
    } else {
      out[i] = static_cast<To>(static_cast<float>(in[i]));
    }
  }
}

template <typename From>
void convert_from(const void* from, DType to_dtype, void* to, std::int64_t count) {
  switch (to_dtype) {
    case DType::kF64:
      return convert<From, double>(from, to, count);
    case DType::kF32:
      return convert<From, float>(from, to, count);
    case DType::kBF16:
      return convert<From, bf16>(from, to, count);
    case DType::kF16:
      return convert<From, f16>(from, to, count);
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[weights] cannot convert to {}", name_of(to_dtype));
  }
}

}  // namespace

void convert_elements(const void* from, DType from_dtype, void* to, DType to_dtype,
                      std::int64_t count) {
  switch (from_dtype) {
    case DType::kF64:
      return convert_from<double>(from, to_dtype, to, count);
    case DType::kF32:
      return convert_from<float>(from, to_dtype, to, count);
    case DType::kBF16:
      return convert_from<bf16>(from, to_dtype, to, count);
    case DType::kF16:
      return convert_from<f16>(from, to_dtype, to, count);
    default:
      TESSERA_FAIL(ErrorKind::kUser, "[weights] values stored as {} cannot be loaded as weights",
                   name_of(from_dtype));
  }
}

namespace {

// Calls visit(spec, extent, piece of the shard's exact values) for every rectangle this rank owns.
void for_each_owned(
    ModelRuntime& runtime,
    const std::function<void(const ParamSpec&, const GlobalExtent&, const Tensor&)>& visit) {
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_shards(); ++b) {
    const ParamStore::Shard& shard = params.shard(b);
    for (const ShardPiece& piece : shard.pieces) {
      const auto index = static_cast<std::size_t>(piece.param);
      const ParamSpec& spec = params.bucket(b).params[index];
      for (const GlobalExtent& extent :
           global_extents(piece, params.layout(b).pieces[index].extent)) {
        visit(spec, extent, shard.exact().flat_slice(extent.shard_begin, extent.elements()));
      }
    }
  }
}

std::uint64_t name_stream(const std::string& name) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace

namespace {

// The values of a rectangle, where they lie or, for host memory, through the device's staging.
void fill_rows(FillNormal args, const GlobalExtent& extent, const Tensor& values,
               ModelRuntime& runtime) {
  Stream& stream = runtime.compute();
  const Tensor staging = runtime.params().options().offloads_masters
                             ? runtime.states().staging()
                             : Tensor{};
  const std::int64_t step = staging.defined() ? staging.numel() / extent.cols : extent.rows;
  CHECK(step > 0, "[weights] rows of {} elements in a staging of {}", extent.cols,
        staging.numel());
  for (std::int64_t row = 0; row < extent.rows; row += step) {
    const std::int64_t rows = std::min(step, extent.rows - row);
    const Tensor target = values.flat_slice(row * extent.cols, rows * extent.cols);
    const Tensor filled = staging.defined() ? staging.flat_slice(0, target.numel()) : target;
    args.out = filled.reshape(Shape{rows, extent.cols});
    args.first_row = extent.row_begin + row;
    fill_normal(args, stream);
    if (staging.defined()) stream.copy_bytes(target.data, filled.data, target.bytes());
  }
}

}  // namespace

void initialize_random(ModelRuntime& runtime, std::uint64_t seed) {
  for_each_owned(runtime,
                 [&](const ParamSpec& spec, const GlobalExtent& extent, const Tensor& values) {
                   FillNormal args;
                   args.key = derive_key(seed, RandomPurpose::kInit, 0, name_stream(spec.name));
                   args.first_col = extent.col_begin;
                   args.global_cols = spec.shape.rank == 2 ? spec.shape[1] : 1;
                   args.mean = spec.init_mean;
                   args.std = spec.init_std;
                   fill_rows(args, extent, values, runtime);
                 });
  refresh_weights(runtime);
}

namespace {

// The mean of the first rows of a matrix in a file, summed in double precision from the first row
// on, so that every rank and layout gets the same numbers.
std::vector<double> mean_row(const SafetensorsFolder::Entry& entry, std::int64_t rows) {
  const std::int64_t cols = entry.tensor->shape.at(1);
  const DType stored = entry.tensor->dtype.value();
  const std::int64_t step =
      std::max<std::int64_t>(1, kStagingBytes / (cols * static_cast<std::int64_t>(sizeof(double))));
  std::vector<double> sum(static_cast<std::size_t>(cols), 0.0);
  std::vector<char> raw;
  std::vector<double> values;
  for (std::int64_t row = 0; row < rows; row += step) {
    const std::int64_t count = std::min(step, rows - row);
    raw.resize(static_cast<std::size_t>(count * cols) * size_of(stored));
    values.resize(static_cast<std::size_t>(count * cols));
    entry.file->read_rectangle(*entry.tensor, {row, count, 0, cols}, raw.data());
    convert_elements(raw.data(), stored, values.data(), DType::kF64, count * cols);
    for (std::size_t i = 0; i < values.size(); ++i) sum[i % sum.size()] += values[i];
  }
  for (double& value : sum) value /= static_cast<double>(rows);
  return sum;
}

}  // namespace

void load_weights(ModelRuntime& runtime, const SafetensorsFolder& folder, const HfNameMap& names,
                  const AddedRows* added) {
  std::vector<char> raw;
  std::vector<char> converted;
  std::map<std::string, std::vector<double>> means;  // of the vocabulary's tensors, read at need
  const auto is_new = [added](std::int64_t row) {
    return row >= added->rows_in_file ||
           std::binary_search(added->rows.begin(), added->rows.end(), row);
  };
  for_each_owned(
      runtime, [&](const ParamSpec& spec, const GlobalExtent& extent, const Tensor& values) {
        const SafetensorsFolder::Entry& entry = folder.get(names.file_name_of.at(spec.name));
        const DType stored = entry.tensor->dtype.value();
        const bool is_vector = spec.shape.rank == 1;  // a column here, a row in the file
        const bool is_extended =
            added != nullptr && (spec.name == kEmbeddingName || spec.name == kLmHeadName);
        const std::int64_t rows_at_once = std::max<std::int64_t>(
            1, kStagingBytes / (extent.cols * static_cast<std::int64_t>(size_of(DType::kF64))));
        for (std::int64_t row = 0; row < extent.rows; row += rows_at_once) {
          const std::int64_t rows = std::min(rows_at_once, extent.rows - row);
          const std::int64_t count = rows * extent.cols;
          TensorRectangle rectangle{extent.row_begin + row, rows, extent.col_begin, extent.cols};
          if (is_vector) rectangle = TensorRectangle{0, 1, extent.row_begin + row, rows};
          const Tensor target = values.flat_slice(row * extent.cols, count);
          converted.resize(target.bytes());
          if (is_extended) {
            rectangle.row_count =
                std::clamp<std::int64_t>(added->rows_in_file - rectangle.row_begin, 0, rows);
          }
          if (rectangle.row_count > 0) {
            const std::int64_t stored_count = rectangle.row_count * rectangle.col_count;
            raw.resize(static_cast<std::size_t>(stored_count) * size_of(stored));
            entry.file->read_rectangle(*entry.tensor, rectangle, raw.data());
            convert_elements(raw.data(), stored, converted.data(), target.dtype, stored_count);
          }
          for (std::int64_t i = 0; is_extended && i < rows; ++i) {
            if (!is_new(extent.row_begin + row + i)) continue;
            std::vector<double>& mean = means[spec.name];
            if (mean.empty()) mean = mean_row(entry, added->known_rows);
            convert_elements(mean.data() + extent.col_begin, DType::kF64,
                             converted.data() +
                                 static_cast<std::size_t>(i * extent.cols) * size_of(target.dtype),
                             target.dtype, extent.cols);
          }
          runtime.compute().copy_bytes(target.data, converted.data(), target.bytes());
          runtime.compute().synchronize();
        }
      });
  refresh_weights(runtime);
}

void refresh_weights(ModelRuntime& runtime) {
  if (MomentImage* image = runtime.moment_image()) image->write_shards(runtime.compute());
  runtime.states().read_masters([&](const ShardState& state) {
    if (state.master.defined()) scale(Scale{state.master, state.weight}, runtime.compute());
  });
  runtime.sync().publish();
  runtime.compute().synchronize();
}

std::vector<NamedState> parameter_state(ModelRuntime& runtime) {
  std::vector<NamedState> states;
  ParamStore& params = runtime.params();
  const ProcessMesh& mesh = params.mesh();
  const bool is_first_replica = !mesh.has_replicas() || mesh.replicas().rank() == 0;
  const bool is_first_copy =
      params.shard_count() > 1 ? is_first_replica : mesh.data_context().rank() == 0;
  const auto collect = [&](const std::string& prefix,
                           const std::function<Tensor(int)>& get) {
    for (int b = 0; b < params.num_shards(); ++b) {
      const ParamStore::Shard& shard = params.shard(b);
      const Tensor values = get(b);
      for (const ShardPiece& piece : shard.pieces) {
        const auto index = static_cast<std::size_t>(piece.param);
        const ParamSpec& spec = params.bucket(b).params[index];
        const LocalExtent& local = params.layout(b).pieces[index].extent;
        NamedState state;
        state.name = prefix + spec.name;
        state.dtype = values.dtype;
        state.shape = spec.shape;
        state.writes = is_first_copy && local.copy == 0 && !spec.is_copy;
        for (const GlobalExtent& extent : global_extents(piece, local)) {
          state.pieces.push_back({extent.row_begin, extent.rows, extent.col_begin, extent.cols,
                                  values.flat_slice(extent.shard_begin, extent.elements())});
        }
        states.push_back(std::move(state));
      }
    }
  };
  collect("weight/", [&](int b) { return params.shard(b).exact(); });
  if (!params.options().trains) return states;
  MomentImage* image = runtime.moment_image(true);
  if (image != nullptr) image->read_shards(runtime.compute());
  collect("adam_m/", [&](int b) { return image != nullptr ? image->m(b) : params.shard(b).m; });
  collect("adam_v/", [&](int b) { return image != nullptr ? image->v(b) : params.shard(b).v; });
  return states;
}

}  // namespace tessera
