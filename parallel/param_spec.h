// ParamSpec: everything that sharding, initialisation, the optimizer and checkpoints need to know
// about one parameter, declared by the layer that owns it. Layers name parameters as Hugging Face
// does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/tensor.h"

namespace tessera {

// How a parameter is spread over the tensor-parallel ranks.
struct Placement {
  enum class Kind : unsigned char {
    kReplicated,
    kSharded,          // equal pieces along `dim`, a multiple of `quantum` each
    kShardedInGroups,  // `groups` < tp pieces along dim 0, each held by tp / groups consecutive
                       // ranks
  };
  Kind kind = Kind::kReplicated;
  int dim = 0;
  std::int64_t groups = 0;
  // A piece of a sharded dim holds a multiple of this many entries, so that any size can be cut and
  // GEMMs stay aligned: the last pieces are padded with zeros. Only the valid part is ever read,
  // saved or counted. 1: the size must divide.
  std::int64_t quantum = 1;

  static Placement replicated() { return {}; }
  static Placement sharded(int dim, std::int64_t quantum = 1) {
    return {Kind::kSharded, dim, 0, quantum};
  }
  static Placement in_groups(std::int64_t groups) { return {Kind::kShardedInGroups, 0, groups, 1}; }
};

// The tensor-parallel ranks over which a local gradient is only a partial sum.
enum class GradientSum : unsigned char {
  kNone,    // complete on each rank that holds the piece
  kTensor,  // over all of tp: norms under sequence parallelism, q/k norms
  kCopies,  // over the ranks that hold a copy of the same group
};

struct ParamSpec {
  std::string name;
  Shape shape;  // global, rank 1 or 2, without padding
  Placement placement;
  GradientSum gradient_sum = GradientSum::kNone;
  float init_mean = 0;
  float init_std = 0;
  bool decay = false;  // rule: matrices decay, vectors (norms, biases) do not
  float lr_scale = 1;
  // Laid out directly behind the previous parameter, so that both form one matrix (q, k, v; gate,
  // up).
  bool follows_previous = false;
  // A pipeline stage's second copy of a parameter that another stage holds (a tied embedding beside
  // the head): not counted in norms and not saved. See BucketSpec::is_on_both_ends.
  bool is_copy = false;
};

// A parameter's place in a model: bucket (embedding, block l, head) and position in it.
struct ParamId {
  int bucket = -1;
  int index = -1;
  bool defined() const { return bucket >= 0; }
};

// Buckets that are never in use at the same time may take turns in the same memory where whole
// buckets come and go (gradients under ZeRO 2, weights too under ZeRO 3).
enum class BucketPool : unsigned char {
  kOwn,     // used at any time: memory of its own
  kEdges,   // one at a time: embedding and head
  kBlocks,  // one after another, the next fetched meanwhile: two buffers
};

struct BucketSpec {
  std::string name;
  std::vector<ParamSpec> params;
  BucketPool pool = BucketPool::kOwn;
  // The first and the last pipeline stage hold this bucket alike and add up their gradients.
  bool is_on_both_ends = false;
};

// Collects the parameters of a model while its layers are constructed.
class ParamRegistry {
 public:
  int add_bucket(std::string name, BucketPool pool = BucketPool::kOwn,
                 bool is_on_both_ends = false) {
    buckets_.push_back({std::move(name), {}, pool, is_on_both_ends});
    return static_cast<int>(buckets_.size()) - 1;
  }
  ParamId add(int bucket, ParamSpec spec) {
    auto& params = buckets_.at(static_cast<std::size_t>(bucket)).params;
    params.push_back(std::move(spec));
    return {bucket, static_cast<int>(params.size()) - 1};
  }
  const std::vector<BucketSpec>& buckets() const { return buckets_; }

 private:
  std::vector<BucketSpec> buckets_;
};

}  // namespace tessera
