// What each ZeRO stage does with weights and gradients, apart from any model: every stage ends with
// the same sums, and leases give whole weights.
#include "parallel/param_sync.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/memory/scratch.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

constexpr int kBlocks = 4;

std::vector<BucketSpec> buckets() {
  ParamRegistry registry;
  const auto add = [&](int bucket, const std::string& name, Shape shape) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = shape;
    return registry.add(bucket, std::move(spec));
  };
  add(registry.add_bucket("embedding", BucketPool::kEdges), "embedding", Shape{7, 33});
  for (int i = 0; i < kBlocks; ++i) {
    const int bucket = registry.add_bucket("block " + std::to_string(i), BucketPool::kBlocks);
    add(bucket, "norm" + std::to_string(i), Shape{5});
    add(bucket, "matrix" + std::to_string(i), Shape{10 + i, 40});
  }
  add(registry.add_bucket("head", BucketPool::kEdges), "head", Shape{3});
  return registry.buckets();
}

// One rank's store with its streams.
struct Rank {
  Rank(Communicator& world, BackendContext& context, int zero, std::int64_t bucket_bytes)
      : mesh(world.subgroup(all_of(world), "world"), shape_of(world)),
        compute(context.make_stream("compute")),
        communication(context.make_stream("communication")) {
    ParamStoreOptions options;
    options.compute = DType::kF32;
    options.zero = zero;
    options.bucket_bytes = bucket_bytes;
    const auto meta = make_context(Device{DeviceKind::kMeta, 0});
    Arena measure(*meta, 0);
    const ParamStore planned(buckets(), mesh, options, measure);
    arena = std::make_unique<Arena>(context, measure.used());
    store = std::make_unique<ParamStore>(buckets(), mesh, options, *arena);
    store->initialize(*compute);
    sync = std::make_unique<ParamSync>(*store, *compute, *communication);
  }
  static std::vector<int> all_of(Communicator& world) {
    std::vector<int> ranks;
    for (int i = 0; i < world.size(); ++i) ranks.push_back(i);
    return ranks;
  }
  static MeshShape shape_of(Communicator& world) {
    MeshShape shape;
    shape.data = world.size();
    return shape;
  }

  // Writes `value(parameter, element)` to this rank's shards, and publishes them.
  template <typename Value>
  void set_shards(Value&& value) {
    for (int b = 0; b < store->num_shards(); ++b) {
      const ParamStore::Shard& shard = store->shard(b);
      for (const ShardPiece& piece : shard.pieces) {
        std::vector<float> values;
        for (std::int64_t e = 0; e < piece.length; ++e)
          values.push_back(value(b, piece.param, piece.local_begin + e));
        const Tensor to = shard.weight.flat_slice(piece.shard_begin, piece.length);
        compute->copy_bytes(to.data, values.data(), to.bytes());
        compute->synchronize();
      }
    }
    sync->publish();
  }
  std::vector<float> read(const Tensor& tensor) {
    std::vector<float> values(static_cast<std::size_t>(tensor.numel()));
    compute->copy_bytes(values.data(), tensor.data, tensor.bytes());
    compute->synchronize();
    return values;
  }

  ProcessMesh mesh;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<Stream> communication;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<ParamSync> sync;
};

float weight_of(int step, int bucket, int param, std::int64_t element) {
  return static_cast<float>(step * 100000 + bucket * 10000 + param * 1000 + element);
}

template <typename Body>
void on_ranks(int size, bool inline_streams, int zero, std::int64_t bucket_bytes, Body&& body) {
  ThreadRankOptions options;
  options.inline_streams = inline_streams;
  run_thread_ranks(size, options, [&](RankEnv& env) {
    Rank rank(env.world, env.context, zero, bucket_bytes);
    body(rank);
    rank.compute->synchronize();
    rank.communication->synchronize();
  });
}

void expect_whole(Rank& rank, int step, int bucket) {
  const WeightLease lease = rank.sync->acquire(bucket);
  const auto& specs = rank.store->bucket(bucket).params;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const int param = static_cast<int>(i);
    const auto values = rank.read(rank.store->weight({bucket, param}));
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), specs[i].shape.numel());
    for (std::size_t e = 0; e < values.size(); ++e) {
      ASSERT_EQ(values[e], weight_of(step, bucket, param, static_cast<std::int64_t>(e)))
          << specs[i].name << " element " << e;
    }
  }
}

TEST(ParamSync, LeasesGiveWholeWeightsUnderEveryStage) {
  for (const int size : {1, 2, 3}) {
    for (const int zero : {0, 1, 2, 3}) {
      for (const std::int64_t bucket_bytes : {0, 1024}) {
        on_ranks(size, size % 2 == 0, zero, bucket_bytes, [&](Rank& rank) {
          const int count = rank.store->num_buckets();
          for (const int step : {1, 2}) {
            rank.set_shards(
                [&](int b, int param, std::int64_t e) { return weight_of(step, b, param, e); });
            // Forward with a prefetch, back, and out of order.
            for (int b = 0; b < count; ++b) {
              rank.sync->prefetch(b + 1 < count ? b + 1 : -1);
              expect_whole(rank, step, b);
            }
            for (int b = count - 1; b >= 0; --b) {
              rank.sync->prefetch(b - 1);
              expect_whole(rank, step, b);
            }
            for (const int b : {3, 1, 4, 0, 2, 5, 1}) expect_whole(rank, step, b);
          }
        });
      }
    }
  }
}

TEST(ParamSync, GradientsOfAllMicroBatchesAndRanksAddUp) {
  for (const int size : {1, 2, 3}) {
    for (const int zero : {0, 1, 2, 3}) {
      for (const std::int64_t bucket_bytes : {0, 1024}) {
        on_ranks(size, size % 2 == 1, zero, bucket_bytes, [&](Rank& rank) {
          const int own = rank.mesh.data().rank();
          for (const int step : {1, 2}) {
            rank.store->begin_step();
            for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
              for (int b = rank.store->num_buckets() - 1; b >= 0; --b) {
                rank.sync->open_gradients(b);
                rank.sync->open_gradients(b);  // of two layers that share a bucket
                for (int p = 0; p < static_cast<int>(rank.store->bucket(b).params.size()); ++p) {
                  const GradientTarget target = rank.store->gradient({b, p});
                  EXPECT_EQ(target.accumulate, micro_batch > 0 && zero < 2);
                  std::vector<float> values =
                      target.accumulate
                          ? rank.read(target.tensor)
                          : std::vector<float>(static_cast<std::size_t>(target.tensor.numel()));
                  for (std::size_t e = 0; e < values.size(); ++e) {
                    values[e] += static_cast<float>(step + 10 * own + 100 * micro_batch +
                                                    static_cast<int>(e) % 7);
                  }
                  rank.compute->copy_bytes(target.tensor.data, values.data(),
                                           target.tensor.bytes());
                  rank.compute->synchronize();
                }
                rank.sync->gradients_ready(b, micro_batch == 2);
              }
            }
            rank.sync->finish_gradients();
            for (int b = 0; b < rank.store->num_shards(); ++b) {
              const ParamStore::Shard& shard = rank.store->shard(b);
              const auto values = rank.read(shard.gradient);
              for (const ShardPiece& piece : shard.pieces) {
                for (std::int64_t i = 0; i < piece.length; ++i) {
                  const auto e = static_cast<int>(piece.local_begin + i) % 7;
                  const int ranks = 10 * size * (size - 1) / 2 * 3;
                  const int wanted = 3 * size * (step + e) + ranks + 100 * 3 * size;
                  ASSERT_EQ(values[static_cast<std::size_t>(piece.shard_begin + i)],
                            static_cast<float>(wanted))
                      << "size " << size << " zero " << zero << " bucket " << b;
                }
              }
            }
          }
        });
      }
    }
  }
}

TEST(ParamSync, WrongUseIsFound) {
  on_ranks(2, true, 3, 0, [](Rank& rank) {
    expect_error(ErrorKind::kInternal, {"weights of block 1", "without a lease"}, [&] {
      rank.store->weight({2, 0});
    });
    const WeightLease first = rank.sync->acquire(1);
    rank.sync->prefetch(3);  // the same buffer: left alone while it is leased
    expect_error(ErrorKind::kInternal, {"block 2 is acquired while block 0 holds its buffer"},
                 [&] { const WeightLease other = rank.sync->acquire(3); });
    rank.sync->open_gradients(1);
    expect_error(ErrorKind::kInternal, {"gradients of block 2 would overwrite those of block 0"},
                 [&] { rank.sync->open_gradients(3); });
    expect_error(ErrorKind::kInternal, {"block 0 has gradients that backward did not write"},
                 [&] { rank.sync->gradients_ready(1, true); });
  });
}

}  // namespace
}  // namespace tessera::test
