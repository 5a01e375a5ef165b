#include "parallel/mesh.h"

#include <initializer_list>
#include <vector>

namespace tessera {
namespace {

int extent_of(const MeshShape& shape, MeshAxis axis) {
  switch (axis) {
    case MeshAxis::kPipeline:
      return shape.pipeline;
    case MeshAxis::kData:
      return shape.data;
    case MeshAxis::kContext:
      return shape.context;
    case MeshAxis::kTensor:
      return shape.tensor;
  }
  return 1;
}

int& along(MeshCoordinate& coordinate, MeshAxis axis) {
  switch (axis) {
    case MeshAxis::kPipeline:
      return coordinate.pipeline;
    case MeshAxis::kData:
      return coordinate.data;
    case MeshAxis::kContext:
      return coordinate.context;
    case MeshAxis::kTensor:
      break;
  }
  return coordinate.tensor;
}

void check_shape(const MeshShape& shape) {
  CHECK_USER(shape.pipeline >= 1 && shape.data >= 1 && shape.context >= 1 && shape.tensor >= 1,
             "[mesh] pipeline {}, data {}, context {} and tensor {} must each be at least 1",
             shape.pipeline, shape.data, shape.context, shape.tensor);
}

}  // namespace

MeshCoordinate coordinate_of(const MeshShape& shape, int rank) {
  check_shape(shape);
  CHECK(rank >= 0 && rank < shape.size(), "[mesh] rank {} is outside a mesh of {} ranks", rank,
        shape.size());
  MeshCoordinate result;
  result.tensor = rank % shape.tensor;
  rank /= shape.tensor;
  result.context = rank % shape.context;
  rank /= shape.context;
  result.data = rank % shape.data;
  result.pipeline = rank / shape.data;
  return result;
}

int rank_of(const MeshShape& shape, const MeshCoordinate& coordinate) {
  return ((coordinate.pipeline * shape.data + coordinate.data) * shape.context +
          coordinate.context) *
             shape.tensor +
         coordinate.tensor;
}

std::vector<int> mesh_members(const MeshShape& shape, const MeshCoordinate& coordinate,
                              std::initializer_list<MeshAxis> axes) {
  std::vector<MeshCoordinate> found = {coordinate};
  for (const MeshAxis axis : axes) {
    std::vector<MeshCoordinate> next;
    for (const MeshCoordinate& at : found) {
      for (int i = 0; i < extent_of(shape, axis); ++i) {
        MeshCoordinate moved = at;
        along(moved, axis) = i;
        next.push_back(moved);
      }
    }
    found = std::move(next);
  }
  std::vector<int> ranks;
  for (const MeshCoordinate& at : found) ranks.push_back(rank_of(shape, at));
  return ranks;
}

ProcessMesh::ProcessMesh(std::unique_ptr<Communicator> world, const MeshShape& shape)
    : shape_(shape), world_(std::move(world)) {
  check_shape(shape);
  CHECK_USER(
      world_->size() == shape.size(),
      "[mesh] the layout pipeline {} x data {} x context {} x tensor {} needs {} ranks, but "
      "there are {}. Change parallel.tensor, parallel.pipeline or parallel.context, or start "
      "{} ranks",
      shape.pipeline, shape.data, shape.context, shape.tensor, shape.size(), world_->size(),
      shape.size());
  coordinate_ = coordinate_of(shape, world_->rank());
  const auto group = [&](const char* name, std::initializer_list<MeshAxis> axes) {
    return world_->subgroup(mesh_members(shape_, coordinate_, axes), name);
  };
  tensor_ = group("tp", {MeshAxis::kTensor});
  context_ = group("cp", {MeshAxis::kContext});
  data_ = group("dp", {MeshAxis::kData});
  pipeline_ = group("pp", {MeshAxis::kPipeline});
  data_context_ = group("dp_cp", {MeshAxis::kData, MeshAxis::kContext});
  model_ = group("pp_tp", {MeshAxis::kPipeline, MeshAxis::kTensor});
  const int shard = shape.shard_size();
  if (shard < data_context_->size()) {
    CHECK(data_context_->size() % shard == 0, "[mesh] {} ranks are no multiple of shards over {}",
          data_context_->size(), shard);
    const std::vector<int> all =
        mesh_members(shape_, coordinate_, {MeshAxis::kData, MeshAxis::kContext});
    const int own = data_context_->rank();
    std::vector<int> near;
    std::vector<int> far;
    for (int i = 0; i < data_context_->size(); ++i) {
      if (i / shard == own / shard) near.push_back(all[static_cast<std::size_t>(i)]);
      if (i % shard == own % shard) far.push_back(all[static_cast<std::size_t>(i)]);
    }
    shard_ = world_->subgroup(near, "shard");
    replicas_ = world_->subgroup(far, "replicas");
  }
  std::vector<int> ends = {world_->rank()};
  const int stage = coordinate_.pipeline;
  if (shape.pipeline > 1 && (stage == 0 || stage == shape.pipeline - 1)) {
    const std::vector<int> stages = mesh_members(shape_, coordinate_, {MeshAxis::kPipeline});
    ends = {stages.front(), stages.back()};
  }
  pipeline_ends_ = world_->subgroup(ends, "pp_ends");
}

}  // namespace tessera
