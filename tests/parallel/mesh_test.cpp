#include "parallel/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/parallel/thread_ranks.h"

namespace tessera::test {
namespace {

TEST(Mesh, CoordinatesAndRanksAreInverse) {
  const MeshShape shape{2, 3, 2, 4};
  ASSERT_EQ(shape.size(), 48);
  for (int rank = 0; rank < shape.size(); ++rank) {
    EXPECT_EQ(rank_of(shape, coordinate_of(shape, rank)), rank);
  }
  // Tensor ranks are neighbours, pipeline stages are furthest apart.
  EXPECT_EQ(coordinate_of(shape, 1).tensor, 1);
  EXPECT_EQ(coordinate_of(shape, 4).context, 1);
  EXPECT_EQ(coordinate_of(shape, 8).data, 1);
  EXPECT_EQ(coordinate_of(shape, 24).pipeline, 1);
  EXPECT_THROW(coordinate_of(shape, 48), Error);
  EXPECT_THROW(coordinate_of(MeshShape{1, 0, 1, 1}, 0), Error);
}

TEST(Mesh, MembersOfAxesPartitionTheWorld) {
  const MeshShape shape{2, 3, 2, 2};
  const std::initializer_list<MeshAxis> axes = {MeshAxis::kData, MeshAxis::kContext};
  std::multiset<int> seen;
  for (int rank = 0; rank < shape.size(); ++rank) {
    const auto members = mesh_members(shape, coordinate_of(shape, rank), axes);
    ASSERT_EQ(members.size(), 6u);
    EXPECT_TRUE(std::is_sorted(members.begin(), members.end()));
    EXPECT_TRUE(std::count(members.begin(), members.end(), rank) == 1);
    if (members.front() == rank) seen.insert(members.begin(), members.end());
  }
  for (int rank = 0; rank < shape.size(); ++rank) EXPECT_EQ(seen.count(rank), 1u);
  EXPECT_EQ(mesh_members(shape, coordinate_of(shape, 5), {}), std::vector<int>{5});
}

TEST(Mesh, EveryAxisSumsOverItsOwnRanks) {
  const MeshShape shape{2, 2, 2, 3};
  run_thread_ranks(shape.size(), {}, [&](RankEnv& env) {
    std::vector<int> all;
    for (int r = 0; r < shape.size(); ++r) all.push_back(r);
    ProcessMesh mesh(env.world.subgroup(all, "world"), shape);
    const auto stream = env.context.make_stream("comm");
    const auto members = [&](Communicator& group) {
      std::vector<std::int32_t> ranks(static_cast<std::size_t>(group.size()));
      std::int32_t own = mesh.world().rank();
      group.all_gather({&own, DType::kI32, {1}, Device{}},
                       {ranks.data(), DType::kI32, {group.size()}, Device{}}, *stream);
      return std::vector<int>(ranks.begin(), ranks.end());
    };
    const auto wanted = [&](std::initializer_list<MeshAxis> axes) {
      return mesh_members(shape, mesh.coordinate(), axes);
    };
    REQUIRE_THAT(members(mesh.tensor()) == wanted({MeshAxis::kTensor}), "tensor");
    REQUIRE_THAT(members(mesh.context()) == wanted({MeshAxis::kContext}), "context");
    REQUIRE_THAT(members(mesh.data()) == wanted({MeshAxis::kData}), "data");
    REQUIRE_THAT(members(mesh.pipeline()) == wanted({MeshAxis::kPipeline}), "pipeline");
    REQUIRE_THAT(members(mesh.data_context()) == wanted({MeshAxis::kData, MeshAxis::kContext}),
                 "dp x cp");
    REQUIRE_THAT(members(mesh.model()) == wanted({MeshAxis::kPipeline, MeshAxis::kTensor}),
                 "pp x tp");
    REQUIRE_THAT(mesh.tensor().rank() == mesh.coordinate().tensor, "the rank in tp");
    REQUIRE_THAT(mesh.tensor().name() == "tp", "the name of tp");
  });
}

TEST(Mesh, ShardsOfANodeAndTheirReplicas) {
  // 2 stages x 4 data x 2 tensor; nodes of four ranks hold two data-parallel ranks.
  MeshShape shape{2, 4, 1, 2};
  shape.shard = 2;
  run_thread_ranks(shape.size(), {}, [&](RankEnv& env) {
    std::vector<int> all;
    for (int r = 0; r < shape.size(); ++r) all.push_back(r);
    ProcessMesh mesh(env.world.subgroup(all, "world"), shape);
    const auto stream = env.context.make_stream("comm");
    const auto members = [&](Communicator& group) {
      std::vector<std::int32_t> ranks(static_cast<std::size_t>(group.size()));
      std::int32_t own = mesh.world().rank();
      group.all_gather({&own, DType::kI32, {1}, Device{}},
                       {ranks.data(), DType::kI32, {group.size()}, Device{}}, *stream);
      return std::vector<int>(ranks.begin(), ranks.end());
    };
    const int rank = mesh.world().rank();
    const int first = rank / 4 * 4 + rank % 2;  // of its node
    REQUIRE_THAT(members(mesh.shard()) == std::vector<int>({first, first + 2}), "shard");
    REQUIRE_THAT(mesh.has_replicas(), "replicas");
    const int stage = rank / 8 * 8;
    const int place = rank % 4;
    REQUIRE_THAT(members(mesh.replicas()) == std::vector<int>({stage + place, stage + 4 + place}),
                 "replicas");
    const int other = rank % 8;
    REQUIRE_THAT(members(mesh.pipeline_ends()) == std::vector<int>({other, 8 + other}), "ends");
  });
}

TEST(Mesh, OnlyTheEndsOfAPipelineShareAGroup) {
  const MeshShape shape{3, 2, 1, 1};
  for (int rank = 0; rank < 6; ++rank) {
    const ProcessMesh mesh(make_meta_communicator(rank, 6), shape);
    EXPECT_EQ(mesh.pipeline_ends().size(), rank / 2 == 1 ? 1 : 2) << rank;
    EXPECT_EQ(mesh.pipeline_ends().rank(), rank / 2 == 2 ? 1 : 0) << rank;
    EXPECT_FALSE(mesh.has_replicas());
  }
}

TEST(Mesh, WrongWorldSizeNamesTheNumbers) {
  try {
    ProcessMesh mesh(make_self_communicator(), MeshShape{1, 2, 1, 4});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find("needs 8 ranks, but there are 1"), std::string::npos)
        << error.what();
  }
}

TEST(Mesh, MetaMeshOfManyRanks) {
  const MeshShape shape{16, 4, 1, 8};
  for (const int rank : {0, 77, 511}) {
    ProcessMesh mesh(make_meta_communicator(rank, 512), shape);
    EXPECT_EQ(mesh.tensor().size(), 8);
    EXPECT_EQ(mesh.pipeline().size(), 16);
    EXPECT_EQ(mesh.model().size(), 128);
    EXPECT_EQ(mesh.tensor().rank(), rank % 8);
  }
}

}  // namespace
}  // namespace tessera::test
