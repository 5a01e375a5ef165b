#include "parallel/param_store.h"

#include <algorithm>
#include <cstring>

#include "engine/core/error.h"
#include "engine/device/stream.h"

namespace tessera {
namespace {

static_assert(kShardAlignment % kMomentBlock == 0, "a shard holds whole blocks of moments");

// Random numbers of a parameter are keyed by its name, not by its place in this rank's buckets.
std::uint32_t name_hash(const std::string& name) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

ParamStore::ParamStore(std::vector<BucketSpec> buckets, const ProcessMesh& mesh,
                       const ParamStoreOptions& options, Arena& arena, Arena* host)
    : buckets_(std::move(buckets)), mesh_(&mesh), options_(options) {
  CHECK(options.zero >= 0 && options.zero <= 3, "[param_store] there is no ZeRO stage {}",
        options.zero);
  if (options.zero > 0) {
    shard_count_ = mesh.shard().size();
    shard_rank_ = mesh.shard().rank();
  }
  has_masters_ = options.trains && options.fp32_masters && options.compute == DType::kBF16;
  const int tensor_size = mesh.tensor().size();
  const int tensor_rank = mesh.tensor().rank();
  // One cut for weights and gradients: the wider of the two fills the limit.
  const auto widest = static_cast<std::int64_t>(
      std::max(size_of(options.compute), options.trains ? size_of(options.gradients) : 1));
  for (const BucketSpec& bucket : buckets_) {
    layouts_.push_back(lay_out_bucket(
        bucket, tensor_size, tensor_rank, shard_count_,
        options.bucket_bytes > 0 ? std::max<std::int64_t>(1, options.bucket_bytes / widest) : 0));
    written_.emplace_back(bucket.params.size(), false);
    versions_.push_back(1);
  }
  const auto flat = [&](const std::string& what, std::size_t b, DType dtype, std::int64_t size,
                        MemoryClass memory_class, bool is_offloaded = false) {
    CHECK(!is_offloaded || host != nullptr, "[param_store] no host memory is given for {}", what);
    return (is_offloaded ? *host : arena)
        .allocate(what + " " + buckets_[b].name, dtype, Shape{size}, memory_class);
  };
  assign_buffers();
  choose_code_buckets();
  leased_.resize(buckets_.size(), false);
  weights_ =
      allocate_whole("weights", options.compute, MemoryClass::kWeights, shards_weights(), arena);
  allocate_codes(arena);
  if (options.trains) {
    gradients_ = allocate_whole("gradients", options.gradients, MemoryClass::kGradients,
                                shards_gradients(), arena);
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const BucketLayout& layout = layouts_[b];
    const std::int64_t size = layout.shard_size;
    Shard shard;
    shard.pieces = pieces_of_shard(layout, shard_rank_);
    shard.weight =
        shard_of(weights_, b, shards_weights(), "weight shard", MemoryClass::kWeights, arena);
    if (options.trains) {
      shard.gradient = shard_of(gradients_, b, shards_gradients(), "gradient shard",
                                MemoryClass::kGradients, arena);
      if (has_masters_) {
        shard.master = flat("masters", b, DType::kF32, size, MemoryClass::kMasters,
                            options.offloads_masters);
      }
      const auto moment = [&](const char* what, Tensor& values, Tensor& scale) {
        const bool is_offloaded = options.offloads_moments;
        values = flat(what, b, options.moments, size, MemoryClass::kOptimizer, is_offloaded);
        if (options.moments != DType::kU8) return;
        scale = flat(std::string(what) + " scales", b, DType::kF32, size / kMomentBlock,
                     MemoryClass::kOptimizer, is_offloaded);
      };
      moment("adam m", shard.m, shard.m_scale);
      moment("adam v", shard.v, shard.v_scale);
      std::vector<ShardSegment> segments;
      for (const ShardPiece& piece : shard.pieces) {
        const ParamSpec& spec = buckets_[b].params[static_cast<std::size_t>(piece.param)];
        const LocalExtent& extent = layout.pieces[static_cast<std::size_t>(piece.param)].extent;
        ShardSegment segment;
        segment.begin = piece.shard_begin;
        segment.end = piece.shard_begin + piece.length;
        segment.local_begin = piece.local_begin;
        segment.local_cols = extent.storage_cols;
        segment.global_cols = spec.shape.rank == 2 ? spec.shape[1] : 1;
        segment.global_begin = extent.row_begin * segment.global_cols + extent.col_begin;
        segment.lr_scale = spec.lr_scale;
        segment.weight_decay = spec.decay ? options.weight_decay : 0.0f;
        segment.count_in_norm = extent.copy == 0 && !spec.is_copy ? 1 : 0;
        segment.stream = static_cast<std::int32_t>(name_hash(spec.name) & 0x7fffffffu);
        segments.push_back(segment);
      }
      const auto bytes = static_cast<std::int64_t>(segments.size() * sizeof(ShardSegment));
      shard.segments = flat("segments", b, DType::kU8, bytes, MemoryClass::kOptimizer);
      segments_.push_back(std::move(segments));
    }
    shards_.push_back(std::move(shard));
  }
}

void ParamStore::assign_buffers() {
  int edge = -1;
  int blocks[2] = {-1, -1};
  int next_block = 0;
  for (const BucketSpec& bucket : buckets_) {
    int* shared = nullptr;
    if (bucket.pool == BucketPool::kEdges) shared = &edge;
    if (bucket.pool == BucketPool::kBlocks) shared = &blocks[next_block++ % 2];
    if (shared == nullptr || *shared < 0) {
      buffers_.push_back(num_buffers_++);
      if (shared != nullptr) *shared = buffers_.back();
    } else {
      buffers_.push_back(*shared);
    }
  }
}

std::vector<Tensor> ParamStore::allocate_whole(const char* what, DType dtype,
                                               MemoryClass memory_class, bool is_shared,
                                               Arena& arena) const {
  std::vector<Tensor> result;
  if (!is_shared) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      result.push_back(arena.allocate(std::string(what) + " " + buckets_[b].name, dtype,
                                      Shape{layouts_[b].size}, memory_class));
    }
    return result;
  }
  const bool is_weights = memory_class == MemoryClass::kWeights;
  return allocate_shared(what, dtype, memory_class, arena, [&](std::size_t b) {
    return is_weights && gathers_codes(static_cast<int>(b)) ? 0 : layouts_[b].size;
  });
}

template <typename SizeOf>
std::vector<Tensor> ParamStore::allocate_shared(const char* what, DType dtype, MemoryClass memory_class,
                                                Arena& arena, SizeOf&& size_of_bucket) const {
  std::vector<Tensor> buffers;
  for (int buffer = 0; buffer < num_buffers_; ++buffer) {
    std::int64_t size = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (buffers_[b] == buffer) size = std::max(size, size_of_bucket(b));
    }
    buffers.push_back(size == 0 ? Tensor{}
                                : arena.allocate(fmt::format("{} buffer {}", what, buffer), dtype,
                                                 Shape{size}, memory_class));
  }
  std::vector<Tensor> result;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::int64_t size = size_of_bucket(b);
    result.push_back(size == 0 ? Tensor{}
                               : buffers[static_cast<std::size_t>(buffers_[b])].flat_slice(0, size));
  }
  return result;
}

// Codes are worth a bucket where nearly all of it is read so, and can be where each matrix starts
// at a multiple of what products want.
void ParamStore::choose_code_buckets() {
  constexpr std::int64_t kQuantum = 16;
  constexpr std::int64_t kLeastShare = 8;  // at most an eighth of a bucket is not read as codes
  codes_.resize(buckets_.size());
  // gather_exact needs room for the compute format where the gradients are.
  const bool has_room = options_.trains && size_of(options_.compute) <= size_of(options_.gradients);
  if (!shards_weights() || shard_count_ == 1 || !has_room) return;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    CodeBucket bucket;
    bucket.plain_begin.resize(buckets_[b].params.size(), 0);
    bool fits = true;
    for (const ParamMatrix& matrix : options_.code_matrices) {
      if (matrix.first.bucket != static_cast<int>(b)) continue;
      const Shape shape = matrix_shape(matrix.first, matrix.count);
      CodeMatrix code;
      code.params = matrix;
      code.begin = layouts_[b].pieces[static_cast<std::size_t>(matrix.first.index)].offset;
      code.end = code.begin + shape.numel();
      fits = fits && code.begin % kQuantum == 0 && shape.rows() % kQuantum == 0 && shape.cols() % kQuantum == 0;
      for (int i = 0; i < matrix.count; ++i) {
        bucket.plain_begin[static_cast<std::size_t>(matrix.first.index + i)] = -1;
      }
      bucket.matrices.push_back(code);
    }
    std::int64_t plain = 0;
    for (std::size_t i = 0; i < bucket.plain_begin.size(); ++i) {
      if (bucket.plain_begin[i] < 0) continue;
      bucket.plain_begin[i] = plain;
      plain += (layouts_[b].pieces[i].extent.elements() + kQuantum - 1) / kQuantum * kQuantum;
    }
    if (fits && !bucket.matrices.empty() && plain * kLeastShare <= layouts_[b].size) {
      codes_[b] = std::move(bucket);
    }
  }
}

void ParamStore::allocate_codes(Arena& arena) {
  // Scalars that libraries read lie at multiples of 16 bytes.
  constexpr std::int64_t kSpacing = 4;
  std::int64_t count = 0;
  for (const CodeBucket& bucket : codes_) count += static_cast<std::int64_t>(bucket.matrices.size());
  if (count == 0) return;
  code_amaxes_ = arena.allocate("code amaxes", DType::kF32, Shape{count * kSpacing}, MemoryClass::kWeights);
  code_scales_ = arena.allocate("code scales", DType::kF32, Shape{count * kSpacing}, MemoryClass::kWeights);
  const std::vector<Tensor> whole = allocate_shared(
      "codes", options_.code_format, MemoryClass::kWeights, arena,
      [&](std::size_t b) { return gathers_codes(static_cast<int>(b)) ? layouts_[b].size : 0; });
  const std::vector<Tensor> plain = allocate_shared(
      "plain weights", options_.compute, MemoryClass::kWeights, arena, [&](std::size_t b) {
        std::int64_t size = 0;
        if (!gathers_codes(static_cast<int>(b))) return size;
        for (std::size_t i = 0; i < codes_[b].plain_begin.size(); ++i) {
          if (codes_[b].plain_begin[i] >= 0) {
            size = std::max(size, codes_[b].plain_begin[i] + layouts_[b].pieces[i].extent.elements());
          }
        }
        return size;
      });
  std::int64_t next = 0;
  for (std::size_t b = 0; b < codes_.size(); ++b) {
    CodeBucket& bucket = codes_[b];
    if (bucket.matrices.empty()) continue;
    bucket.whole = whole[b];
    bucket.plain = plain[b];
    bucket.shard = arena.allocate("code shard " + buckets_[b].name, options_.code_format,
                                  Shape{layouts_[b].shard_size}, MemoryClass::kWeights);
    for (CodeMatrix& matrix : bucket.matrices) {
      matrix.amax = code_amaxes_.flat_slice(next, 1);
      matrix.scale = code_scales_.flat_slice(next, 1);
      next += kSpacing;
    }
  }
}

Tensor ParamStore::shard_of(const std::vector<Tensor>& whole, std::size_t b, bool is_separate,
                            const char* what, MemoryClass memory_class, Arena& arena) const {
  const std::int64_t size = layouts_[b].shard_size;
  if (!is_separate && (layouts_[b].parts.size() == 1 || shard_count_ == 1)) {
    return whole[b].flat_slice(size * shard_rank_, size);
  }
  const DType dtype = memory_class == MemoryClass::kWeights ? options_.compute : options_.gradients;
  return arena.allocate(std::string(what) + " " + buckets_[b].name, dtype, Shape{size}, memory_class);
}

Shape ParamStore::matrix_shape(ParamId first, int count) const {
  const BucketLayout& layout = this->layout(first.bucket);
  const LocalExtent& start = layout.pieces[static_cast<std::size_t>(first.index)].extent;
  std::int64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    rows += layout.pieces[static_cast<std::size_t>(first.index + i)].extent.storage_rows;
  }
  if (spec(first).shape.rank == 1) return Shape{rows * start.storage_cols};
  return Shape{rows, start.storage_cols};
}

ParamStore::Codes ParamStore::codes(ParamId first) const {
  CHECK(!checks_leases_ || leased_[static_cast<std::size_t>(first.bucket)],
        "[param_store] the weights of {} are used without a lease", bucket(first.bucket).name);
  const CodeBucket& bucket = code_bucket(first.bucket);
  for (const CodeMatrix& matrix : bucket.matrices) {
    if (matrix.params.first.index != first.index) continue;
    return {view(bucket.whole, first, matrix.params.count), matrix.scale};
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[param_store] {} is not gathered as codes", spec(first).name);
}

Tensor ParamStore::view(const Tensor& flat, ParamId first, int count) const {
  const BucketLayout& layout = this->layout(first.bucket);
  const auto& start = layout.pieces[static_cast<std::size_t>(first.index)];
  std::int64_t rows = 0;
  std::int64_t expected = start.offset;
  for (int i = 0; i < count; ++i) {
    const auto& piece = layout.pieces[static_cast<std::size_t>(first.index + i)];
    CHECK(piece.offset == expected && piece.extent.storage_cols == start.extent.storage_cols,
          "[param_store] {} does not directly follow {}",
          bucket(first.bucket).params[static_cast<std::size_t>(first.index + i)].name,
          spec(first).name);
    rows += piece.extent.storage_rows;
    expected += piece.extent.elements();
  }
  const Tensor piece = flat.flat_slice(start.offset, rows * start.extent.storage_cols);
  if (spec(first).shape.rank == 1) return piece;
  return piece.reshape(Shape{rows, start.extent.storage_cols});
}

Tensor ParamStore::weight(ParamId id) const { return fused_weight(id, 1); }

Tensor ParamStore::fused_weight(ParamId first, int count) const {
  CHECK(!checks_leases_ || leased_[static_cast<std::size_t>(first.bucket)],
        "[param_store] the weights of {} are used without a lease", bucket(first.bucket).name);
  if (!gathers_codes(first.bucket)) {
    return view(weights_[static_cast<std::size_t>(first.bucket)], first, count);
  }
  const CodeBucket& codes = code_bucket(first.bucket);
  const std::int64_t begin = codes.plain_begin[static_cast<std::size_t>(first.index)];
  CHECK(begin >= 0 && count == 1, "[param_store] the weights of {} are gathered as codes", spec(first).name);
  const Shape shape = matrix_shape(first, count);
  const Tensor flat = codes.plain.flat_slice(begin, shape.numel());
  return shape.rank == 1 ? flat : flat.reshape(shape);
}

GradientTarget ParamStore::gradient(ParamId id) { return fused_gradient(id, 1); }

GradientTarget ParamStore::fused_gradient(ParamId first, int count) {
  auto& written = written_[static_cast<std::size_t>(first.bucket)];
  const bool accumulate = written[static_cast<std::size_t>(first.index)];
  for (int i = 0; i < count; ++i) written[static_cast<std::size_t>(first.index + i)] = true;
  return {view(gradients_[static_cast<std::size_t>(first.bucket)], first, count), accumulate};
}

void ParamStore::begin_step() {
  for (auto& written : written_) std::fill(written.begin(), written.end(), false);
}

void ParamStore::begin_bucket(int b) {
  auto& written = written_[static_cast<std::size_t>(b)];
  std::fill(written.begin(), written.end(), false);
}

bool ParamStore::is_written(int b) const {
  const auto& written = written_[static_cast<std::size_t>(b)];
  return std::all_of(written.begin(), written.end(), [](bool w) { return w; });
}

void ParamStore::initialize(Stream& stream) {
  const auto zero = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device.kind == stream.device().kind) {
      stream.set_zero(tensor.data, tensor.bytes());
    } else {
      std::memset(tensor.data, 0, tensor.bytes());  // host memory beside a GPU
    }
  };
  for (const Tensor& weights : weights_) zero(weights);
  for (const CodeBucket& bucket : codes_) {
    zero(bucket.whole);
    zero(bucket.shard);
    zero(bucket.plain);
  }
  // Padding is never written by a backward but takes part in reductions: it must not start as NaN.
  for (const Tensor& gradients : gradients_) zero(gradients);
  for (std::size_t b = 0; b < shards_.size(); ++b) {
    const Shard& shard = shards_[b];
    zero(shard.weight);
    zero(shard.gradient);
    zero(shard.master);
    zero(shard.m);
    zero(shard.v);
    zero(shard.m_scale);
    zero(shard.v_scale);
    if (shard.segments.defined() && shard.segments.numel() > 0) {
      stream.copy_bytes(shard.segments.data, segments_[b].data(), shard.segments.bytes());
    }
  }
  stream.synchronize();
  checks_leases_ = shards_weights();
}

}  // namespace tessera
