// ProcessMesh: the ranks of a job as a grid pp x dp x cp x tp, tp fastest, with a communicator per
// axis and per product of axes that is reduced over.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace tessera {

enum class MeshAxis : unsigned char { kPipeline, kData, kContext, kTensor };

struct MeshShape {
  int pipeline = 1;
  int data = 1;
  int context = 1;
  int tensor = 1;
  // Ranks of data x context that share ZeRO shards: runs of as many, the whole group by default
  // (0).
  int shard = 0;
  int size() const { return pipeline * data * context * tensor; }
  int shard_size() const { return shard > 0 ? shard : data * context; }
};

struct MeshCoordinate {
  int pipeline = 0;
  int data = 0;
  int context = 0;
  int tensor = 0;
};

// World rank = ((pipeline * data_size + data) * context_size + context) * tensor_size + tensor.
MeshCoordinate coordinate_of(const MeshShape& shape, int rank);
int rank_of(const MeshShape& shape, const MeshCoordinate& coordinate);

// World ranks that differ from `coordinate` only along `axes`; the last of the axes is the fastest.
std::vector<int> mesh_members(const MeshShape& shape, const MeshCoordinate& coordinate,
                              std::initializer_list<MeshAxis> axes);

class ProcessMesh {
 public:
  // Collective over `world`, whose size must be shape.size() (kUser otherwise, naming the numbers).
  ProcessMesh(std::unique_ptr<Communicator> world, const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }
  const MeshCoordinate& coordinate() const { return coordinate_; }
  Communicator& world() const { return *world_; }
  Communicator& tensor() const { return *tensor_; }
  Communicator& data() const { return *data_; }
  Communicator& context() const { return *context_; }
  Communicator& pipeline() const { return *pipeline_; }
  // dp x cp: gradients of one parameter are summed over it.
  Communicator& data_context() const { return *data_context_; }
  // The part of dp x cp over which ZeRO shards are cut: all of it, or a run of shard_size() ranks.
  Communicator& shard() const { return shard_ ? *shard_ : *data_context_; }
  // Where it is a part: the ranks that hold the same shard in the others.
  bool has_replicas() const { return replicas_ != nullptr; }
  Communicator& replicas() const { return *replicas_; }
  // pp x tp: ranks that together hold one copy of the model; norms are summed over it.
  Communicator& model() const { return *model_; }
  // The first and the last pipeline stage at this rank's other coordinates, for those two; a group
  // of one for the stages between.
  Communicator& pipeline_ends() const { return *pipeline_ends_; }

 private:
  MeshShape shape_;
  MeshCoordinate coordinate_;
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<Communicator> tensor_;
  std::unique_ptr<Communicator> data_;
  std::unique_ptr<Communicator> context_;
  std::unique_ptr<Communicator> pipeline_;
  std::unique_ptr<Communicator> data_context_;
  std::unique_ptr<Communicator> shard_;  // null where it is all of data_context
  std::unique_ptr<Communicator> replicas_;
  std::unique_ptr<Communicator> model_;
  std::unique_ptr<Communicator> pipeline_ends_;
};

}  // namespace tessera
