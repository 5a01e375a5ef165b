// Schedules of every kind over many shapes: complete, ordered, free of deadlock under rendezvous
// sends, with buffers that are never used twice at once, and as many micro-batches in flight as
// known.
#include "parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

using Kind = PipelineAction::Kind;

std::vector<PipelineShape> shapes() {
  std::vector<PipelineShape> result;
  for (const PipelineKind kind :
       {PipelineKind::kGPipe, PipelineKind::k1F1B, PipelineKind::kInterleaved}) {
    for (const int stages : {1, 2, 3, 4, 5, 8}) {
      for (const int chunks : {1, 2, 3, 5}) {
        if (chunks > 1 && (kind != PipelineKind::kInterleaved || stages == 1)) continue;
        for (const int micro_batches : {1, 2, 3, 4, 5, 7, 8, 13, 16}) {
          result.push_back({stages, chunks, micro_batches, kind});
        }
      }
    }
  }
  return result;
}

std::string describe(const PipelineShape& shape) {
  return "kind " + std::to_string(static_cast<int>(shape.kind)) + " stages " +
         std::to_string(shape.stages) + " chunks " + std::to_string(shape.chunks) +
         " micro-batches " + std::to_string(shape.micro_batches);
}

std::vector<PipelineSchedule> all_ranks(const PipelineShape& shape) {
  std::vector<PipelineSchedule> result;
  for (int rank = 0; rank < shape.stages; ++rank) result.push_back(pipeline_schedule(shape, rank));
  return result;
}

// Runs the lists with sends that wait for their receive: a rank passes an exchange when all of its
// transfers have met their other side, which stands at an exchange of its own.
class Rendezvous {
 public:
  explicit Rendezvous(const PipelineShape& shape) : shape_(shape), lists_(all_ranks(shape)) {
    at_.resize(lists_.size(), 0);
    open_.resize(lists_.size());
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) enter(rank);
  }

  // False where all ranks wait.
  bool run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < lists_.size(); ++rank) {
        while (at_[rank] < lists_[rank].actions.size()) {
          const PipelineAction& action = lists_[rank].actions[at_[rank]];
          if (action.kind == Kind::kExchange) {
            match(rank);
            if (!open_[rank].empty()) break;
          } else {
            compute(static_cast<int>(rank), action);
          }
          ++at_[rank];
          enter(rank);
          moved = true;
        }
      }
    }
    return std::all_of(at_.begin(), at_.end(), [&, i = std::size_t{0}](std::size_t at) mutable {
      return at == lists_[i++].actions.size();
    });
  }

 private:
  using Work = std::tuple<bool, int, int>;  // forward, piece, micro-batch

  void enter(std::size_t rank) {
    if (at_[rank] >= lists_[rank].actions.size()) return;
    open_[rank] = lists_[rank].actions[at_[rank]].transfers;
  }
  void match(std::size_t rank) {
    auto& own = open_[rank];
    for (std::size_t i = 0; i < own.size();) {
      auto& other = open_[static_cast<std::size_t>(own[i].peer)];
      const auto partner = std::find_if(other.begin(), other.end(), [&](const PipelineTransfer& t) {
        return t.peer == static_cast<int>(rank) && t.is_send != own[i].is_send;
      });
      if (partner == other.end()) {
        ++i;
        continue;
      }
      const PipelineTransfer& send = own[i].is_send ? own[i] : *partner;
      const PipelineTransfer& receive = own[i].is_send ? *partner : own[i];
      EXPECT_EQ(send.is_gradient, receive.is_gradient) << describe(shape_);
      EXPECT_EQ(send.micro_batch, receive.micro_batch) << describe(shape_);
      const int receiver = own[i].is_send ? own[i].peer : static_cast<int>(rank);
      const int piece = receive.chunk * shape_.stages + receiver;
      const Work source{!send.is_gradient, piece + (send.is_gradient ? 1 : -1), send.micro_batch};
      EXPECT_TRUE(done_.contains(source)) << describe(shape_);
      arrived_.insert({!send.is_gradient, piece, send.micro_batch});
      other.erase(partner);
      own.erase(own.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  void compute(int rank, const PipelineAction& action) {
    const bool is_forward = action.kind == Kind::kForward;
    const int piece = action.chunk * shape_.stages + rank;
    const bool is_first = is_forward ? piece == 0 : piece + 1 == shape_.pieces();
    if (!is_first) {
      EXPECT_TRUE(arrived_.contains({is_forward, piece, action.micro_batch})) << describe(shape_);
    }
    if (!is_forward) {
      EXPECT_TRUE(done_.contains({true, piece, action.micro_batch})) << describe(shape_);
    }
    EXPECT_TRUE(done_.insert({is_forward, piece, action.micro_batch}).second) << describe(shape_);
  }

  PipelineShape shape_;
  std::vector<PipelineSchedule> lists_;
  std::vector<std::size_t> at_;
  std::vector<std::vector<PipelineTransfer>> open_;
  std::set<Work> done_;
  std::set<Work> arrived_;
};

TEST(PipelineSchedule, RunsToItsEndUnderRendezvousSends) {
  for (const PipelineShape& shape : shapes())
    ASSERT_TRUE(Rendezvous(shape).run()) << describe(shape);
}

TEST(PipelineSchedule, HasEveryMicroBatchOnceInOrder) {
  for (const PipelineShape& shape : shapes()) {
    for (const PipelineSchedule& list : all_ranks(shape)) {
      std::map<std::pair<bool, int>, std::vector<int>> order;
      for (const PipelineAction& action : list.actions) {
        if (action.kind == Kind::kExchange) continue;
        order[{action.kind == Kind::kForward, action.chunk}].push_back(action.micro_batch);
      }
      ASSERT_EQ(order.size(), static_cast<std::size_t>(2 * shape.chunks)) << describe(shape);
      for (const auto& [what, micro_batches] : order) {
        ASSERT_EQ(micro_batches.size(), static_cast<std::size_t>(shape.micro_batches))
            << describe(shape);
        for (int i = 0; i < shape.micro_batches; ++i) {
          ASSERT_EQ(micro_batches[static_cast<std::size_t>(i)], i) << describe(shape);
        }
      }
    }
  }
}

TEST(PipelineSchedule, KeepsAsManyMicroBatchesAsItsKind) {
  for (const PipelineShape& shape : shapes()) {
    for (int rank = 0; rank < shape.stages; ++rank) {
      const PipelineBuffers buffers = pipeline_schedule(shape, rank).buffers;
      int total = 0;
      for (const int sets : buffers.activations) total += sets;
      switch (shape.kind) {
        case PipelineKind::kGPipe:
          EXPECT_EQ(total, shape.micro_batches) << describe(shape);
          break;
        case PipelineKind::k1F1B:
          EXPECT_EQ(total, std::min(shape.micro_batches, shape.stages - rank)) << describe(shape);
          EXPECT_LE(buffers.inputs, total + 1) << describe(shape);
          break;
        case PipelineKind::kInterleaved:
          // The most of each chunk may come at other times than the most of all.
          EXPECT_LE(total, shape.chunks * std::min(shape.micro_batches, 2 * shape.stages))
              << describe(shape);
          break;
      }
    }
  }
}

TEST(PipelineSchedule, InterleavedHasTheSmallerBubble) {
  for (const int stages : {2, 4, 8}) {
    const int micro_batches = 4 * stages;
    const int plain = pipeline_schedule({stages, 1, micro_batches, PipelineKind::k1F1B}, 0).ticks;
    EXPECT_EQ(plain, 2 * (micro_batches + stages - 1));
    const int chunks = 4;
    // A tick is a chunk's time, a quarter of a stage's.
    const int interleaved =
        pipeline_schedule({stages, chunks, micro_batches, PipelineKind::kInterleaved}, 0).ticks;
    const int bubble = interleaved - 2 * micro_batches * chunks;
    EXPECT_EQ(bubble, 2 * (stages - 1)) << stages;
  }
}

// A buffer is taken and given back by the actions that name it, and never two at once hold it.
TEST(PipelineSchedule, NoBufferIsInUseTwice) {
  for (const PipelineShape& shape : shapes()) {
    for (int rank = 0; rank < shape.stages; ++rank) {
      const PipelineSchedule list = pipeline_schedule(shape, rank);
      std::map<std::pair<int, int>, std::pair<int, int>> activations;  // (chunk, set) -> unit
      std::map<int, std::pair<int, int>> inputs;
      std::map<int, std::pair<int, int>> gradients;
      std::map<int, int> batches;
      const auto take = [&](auto& map, auto key, auto value) {
        ASSERT_TRUE(map.emplace(key, value).second) << describe(shape) << " rank " << rank;
      };
      std::pair<int, int> sent_gradient{-1, -1};
      for (const PipelineAction& action : list.actions) {
        const std::pair unit{action.chunk, action.micro_batch};
        const int piece = action.chunk * shape.stages + rank;
        if (action.kind == Kind::kExchange) {
          for (const PipelineTransfer& transfer : action.transfers) {
            if (transfer.is_send) continue;
            auto& map = transfer.is_gradient ? gradients : inputs;
            take(map, transfer.buffer, std::pair{transfer.chunk, transfer.micro_batch});
          }
          for (const PipelineTransfer& transfer : action.transfers) {
            if (transfer.is_send && transfer.is_gradient) {
              EXPECT_EQ(transfer.buffer, sent_gradient.first);
              gradients.erase(transfer.buffer);
            }
          }
          continue;
        }
        if (action.starts) take(batches, action.batch, action.micro_batch);
        EXPECT_EQ(batches.at(action.batch), action.micro_batch) << describe(shape);
        if (piece > 0) {
          EXPECT_EQ(inputs.at(action.input), unit) << describe(shape);
        }
        if (action.kind == Kind::kForward) {
          take(activations, std::pair{action.chunk, action.activations}, unit);
          if (piece + 1 == shape.pieces()) take(gradients, action.gradient, unit);
          continue;
        }
        EXPECT_EQ(activations.at({action.chunk, action.activations}), unit) << describe(shape);
        EXPECT_EQ(gradients.at(action.gradient), unit) << describe(shape);
        activations.erase({action.chunk, action.activations});
        if (piece > 0) inputs.erase(action.input);
        if (piece == 0) {
          gradients.erase(action.gradient);
        } else {
          sent_gradient = {action.gradient, 0};
        }
        if (action.chunk == 0) batches.erase(action.batch);
      }
      EXPECT_TRUE(activations.empty() && inputs.empty() && gradients.empty() && batches.empty())
          << describe(shape);
    }
  }
}

// The last step of an epoch may have fewer micro-batches: it must do with the buffers of the
// others.
TEST(PipelineSchedule, PlannedBuffersDoForFewerMicroBatches) {
  std::vector<PipelineShape> all_shapes = shapes();
  for (const int chunks : {2, 5}) {
    all_shapes.push_back({2, chunks, 40, PipelineKind::kInterleaved});
    all_shapes.push_back({3, chunks, 50, PipelineKind::kInterleaved});
  }
  for (const PipelineShape& shape : all_shapes) {
    for (int rank = 0; rank < shape.stages; ++rank) {
      const PipelineBuffers all = pipeline_buffers(shape, rank);
      for (int count = 1; count <= shape.micro_batches; ++count) {
        PipelineShape fewer = shape;
        fewer.micro_batches = count;
        const PipelineBuffers some = pipeline_schedule(fewer, rank).buffers;
        ASSERT_LE(some.inputs, all.inputs) << describe(shape) << " " << count << " rank " << rank;
        ASSERT_LE(some.outputs, all.outputs) << describe(shape) << " " << count;
        ASSERT_LE(some.gradients, all.gradients) << describe(shape) << " " << count;
        ASSERT_LE(some.batches, all.batches) << describe(shape) << " " << count;
        for (std::size_t chunk = 0; chunk < all.activations.size(); ++chunk) {
          ASSERT_LE(some.activations[chunk], all.activations[chunk])
              << describe(shape) << " " << count;
        }
      }
    }
  }
}

TEST(PipelineSchedule, ChunksNeedInterleavingAndSeveralRanks) {
  expect_error(ErrorKind::kUser, {"parallel.virtual_stages is 2"}, [] {
    pipeline_schedule({4, 2, 8, PipelineKind::k1F1B}, 0);
  });
  expect_error(ErrorKind::kUser, {"parallel.pipeline above 1"}, [] {
    pipeline_schedule({1, 2, 8, PipelineKind::kInterleaved}, 0);
  });
}

}  // namespace
}  // namespace tessera::test
