// ParamStore: the memory of a model's parameters and their training state on one rank. For every
// bucket it holds the local weights in the compute format, the gradients, and this rank's ZeRO
// shard of masters and moments. ShardLayout alone decides where things lie.
//
// Under ZeRO 2 whole buckets of gradients, and under ZeRO 3 those of weights too, exist only while
// they are in use, in buffers that the buckets of a pool share (BucketPool); ParamSync fills and
// empties them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/memory/arena.h"
#include "kernels/optimizer.h"
#include "parallel/mesh.h"
#include "parallel/param_spec.h"
#include "parallel/shard_layout.h"

namespace tessera {

// Adjacent parameters seen as one matrix.
struct ParamMatrix {
  ParamId first;
  int count = 1;
};

struct ParamStoreOptions {
  DType compute = DType::kBF16;   // of weights in the forward and backward
  bool fp32_masters = true;       // ignored when compute is fp32 or fp64: the weights are exact
  DType gradients = DType::kF32;  // accumulation format
  DType moments = DType::kF32;  // fp32, bf16, or u8: kernels/moment_format.h
  int zero = 0;  // ZeRO stage 0..3
  // Most bytes of weights or gradients in one collective; 0: a bucket at once. Decides the cut:
  // every rank has the same.
  std::int64_t bucket_bytes = 0;
  // Matrices that products read only as FP8 codes with one scale each. Under ZeRO 3 the buckets of
  // such matrices are gathered so, at half the bytes: see gathers_codes.
  std::vector<ParamMatrix> code_matrices;
  DType code_format = DType::kF8E4M3;
  bool trains = true;  // false: weights only (evaluation, generation)
  float weight_decay = 0;
  // Kept in host memory; StateOffload brings them to the device for an update.
  bool offloads_masters = false;
  bool offloads_moments = false;
  // Elements that they come in at a time, a multiple of kShardAlignment: 32 MB of each fp32 tensor
  // keep a link busy.
  std::int64_t offload_piece = std::int64_t{1} << 23;
};

// What an update of a shard, or of a piece of one, reads and writes: flat tensors.
struct ShardState {
  Tensor weight;
  Tensor master;    // undefined without masters
  Tensor gradient;  // undefined when not training
  Tensor m;
  Tensor v;
  Tensor m_scale;   // of 8-bit moments: a scale for every kMomentBlock elements; else undefined
  Tensor v_scale;
  Tensor segments;  // ShardSegment array on the device
};

// Where a layer's backward writes a weight's gradient: `tensor = ` or `tensor +=`.
struct GradientTarget {
  Tensor tensor;
  bool accumulate = false;
};

class ParamStore {
 public:
  // Takes its memory from `arena` in a fixed order, and what is offloaded from `host`, which may be
  // null where nothing is. The mesh must outlive the store.
  ParamStore(std::vector<BucketSpec> buckets, const ProcessMesh& mesh,
             const ParamStoreOptions& options, Arena& arena, Arena* host = nullptr);

  int num_buckets() const { return static_cast<int>(buckets_.size()); }
  const BucketSpec& bucket(int b) const { return buckets_[static_cast<std::size_t>(b)]; }
  const BucketLayout& layout(int b) const { return layouts_[static_cast<std::size_t>(b)]; }
  const ParamSpec& spec(ParamId id) const {
    return bucket(id.bucket).params[static_cast<std::size_t>(id.index)];
  }
  const ParamStoreOptions& options() const { return options_; }
  const ProcessMesh& mesh() const { return *mesh_; }
  int shard_count() const { return shard_count_; }
  int shard_rank() const { return shard_rank_; }
  bool has_masters() const { return has_masters_; }

  // The local piece of a weight, [storage_rows, storage_cols] or [n]. Under ZeRO 3 the caller holds
  // a lease on the bucket (ParamSync::acquire). Not of a matrix that is gathered as codes.
  Tensor weight(ParamId id) const;
  // `first` and the parameters that follow it as one matrix [sum of rows, cols] (or one vector).
  Tensor fused_weight(ParamId first, int count) const;

  // Whether a bucket is gathered as FP8 codes of its code matrices, beside the plain values of its
  // other, few parameters.
  bool gathers_codes(int b) const { return !codes_[static_cast<std::size_t>(b)].matrices.empty(); }
  // A code matrix of such a bucket, under a lease: code * scale is the weight.
  struct Codes {
    Tensor rows;   // [rows, cols] of the code format
    Tensor scale;  // [1] fp32
  };
  Codes codes(ParamId first) const;
  Shape matrix_shape(ParamId first, int count) const;
  // A parameter of a bucket that lies whole in `flat`.
  Tensor weight_in(const Tensor& flat, ParamId id) const { return view(flat, id, 1); }

  // The gradient of a weight, and whether this step has already written to it. The caller writes
  // all of it; the next target of the same parameter in the step accumulates.
  GradientTarget gradient(ParamId id);
  GradientTarget fused_gradient(ParamId first, int count);
  // Marks every gradient as not yet written; called at the start of a step.
  void begin_step();
  // The same for one bucket, whose buffer held another's gradients.
  void begin_bucket(int b);
  // Whether every parameter of the bucket has been written since.
  bool is_written(int b) const;

  // This rank's shard of a bucket's state, of layout(b).shard_size elements. What is offloaded lies
  // in host memory.
  struct Shard : ShardState {
    std::vector<ShardPiece> pieces;
    // The tensor that holds the exact values: master if there is one, else weight.
    const Tensor& exact() const { return master.defined() ? master : weight; }
  };
  const Shard& shard(int b) const { return shards_[static_cast<std::size_t>(b)]; }
  // What shard(b).segments holds.
  const std::vector<ShardSegment>& segments(int b) const {
    return segments_[static_cast<std::size_t>(b)];
  }
  int num_shards() const { return static_cast<int>(shards_.size()); }

  // Whole-bucket memory, for ParamSync.
  const Tensor& bucket_weights(int b) const { return weights_[static_cast<std::size_t>(b)]; }
  const Tensor& bucket_gradients(int b) const { return gradients_[static_cast<std::size_t>(b)]; }
  // Whether the whole bucket and the shard are different memory.
  bool shards_gradients() const { return options_.zero >= 2; }
  bool shards_weights() const { return options_.zero >= 3; }
  // What a bucket that gathers codes has instead of whole weights.
  struct CodeMatrix {
    ParamMatrix params;
    std::int64_t begin = 0;  // elements of the bucket
    std::int64_t end = 0;
    Tensor amax;  // [1] fp32
    Tensor scale;
  };
  struct CodeBucket {
    std::vector<CodeMatrix> matrices;  // empty: the bucket is gathered in the compute format
    Tensor whole;                      // [layout.size] codes; of shared memory
    Tensor shard;                      // [shard_size] codes
    Tensor plain;                      // the other parameters, one behind the other; of shared memory
    std::vector<std::int64_t> plain_begin;  // of each parameter; -1 for one of a matrix
  };
  const CodeBucket& code_bucket(int b) const { return codes_[static_cast<std::size_t>(b)]; }
  // [amaxes] of all of them, in one piece; undefined where there are none.
  const Tensor& code_amaxes() const { return code_amaxes_; }
  // Which buffer of shared memory a bucket uses; bucket_*() is a view of it.
  int num_buffers() const { return num_buffers_; }
  int buffer(int b) const { return buffers_[static_cast<std::size_t>(b)]; }
  // Under ZeRO 3, told by ParamSync: whether a lease holds the bucket.
  void set_leased(int b, bool is_leased) { leased_[static_cast<std::size_t>(b)] = is_leased; }

  // Moves when the weights of a bucket change; whoever keeps something made from them compares it.
  std::uint64_t weight_version(int b) const { return versions_[static_cast<std::size_t>(b)]; }
  void weights_changed(int b) { ++versions_[static_cast<std::size_t>(b)]; }

  // Uploads segment tables and clears all state (weights, moments, gradients).
  void initialize(Stream& stream);

 private:
  void assign_buffers();
  void choose_code_buckets();
  void allocate_codes(Arena& arena);
  // Of the buckets of each shared buffer, the largest size that `size_of_bucket` gives.
  template <typename SizeOf>
  std::vector<Tensor> allocate_shared(const char* what, DType dtype, MemoryClass memory_class, Arena& arena,
                                      SizeOf&& size_of_bucket) const;
  // A flat tensor per bucket; buckets of one buffer share memory when `is_shared`.
  std::vector<Tensor> allocate_whole(const char* what, DType dtype, MemoryClass memory_class,
                                     bool is_shared, Arena& arena) const;
  // Memory of the shard alone, or its piece of the whole bucket where that stays and has one part.
  Tensor shard_of(const std::vector<Tensor>& whole, std::size_t b, bool is_separate,
                  const char* what, MemoryClass memory_class, Arena& arena) const;
  Tensor view(const Tensor& flat, ParamId first, int count) const;

  std::vector<BucketSpec> buckets_;
  const ProcessMesh* mesh_;
  ParamStoreOptions options_;
  int shard_count_ = 1;
  int shard_rank_ = 0;
  bool has_masters_ = false;
  std::vector<BucketLayout> layouts_;
  std::vector<CodeBucket> codes_;
  Tensor code_amaxes_;
  Tensor code_scales_;
  std::vector<Tensor> weights_;  // undefined where codes are gathered
  std::vector<Tensor> gradients_;
  std::vector<Shard> shards_;
  std::vector<std::vector<ShardSegment>> segments_;
  std::vector<std::vector<bool>> written_;
  int num_buffers_ = 0;
  std::vector<int> buffers_;
  std::vector<bool> leased_;
  bool checks_leases_ = false;
  std::vector<std::uint64_t> versions_;
};

}  // namespace tessera
