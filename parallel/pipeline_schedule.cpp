#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <limits>

#include "engine/core/error.h"

namespace tessera {
namespace {

struct Unit {
  int micro_batch = 0;
  int chunk = 0;
};

// The order of one rank's forwards; backwards take the chunks the other way round. Groups of as
// many micro-batches as there are stages go through all chunks: then the first returns to a rank
// just as the last has left it.
std::vector<Unit> unit_order(const PipelineShape& shape, bool is_backward) {
  std::vector<Unit> order;
  for (int first = 0; first < shape.micro_batches; first += shape.stages) {
    const int end = std::min(first + shape.stages, shape.micro_batches);
    for (int i = 0; i < shape.chunks; ++i) {
      const int chunk = is_backward ? shape.chunks - 1 - i : i;
      for (int micro_batch = first; micro_batch < end; ++micro_batch)
        order.push_back({micro_batch, chunk});
    }
  }
  return order;
}

// Most forwards without their backward.
int in_flight_limit(const PipelineShape& shape, int rank) {
  switch (shape.kind) {
    case PipelineKind::kGPipe:
      break;
    case PipelineKind::k1F1B:
      return shape.stages - rank;
    case PipelineKind::kInterleaved:
      return (shape.stages - rank - 1) * 2 + (shape.chunks - 1) * shape.stages + 1;
  }
  return std::numeric_limits<int>::max();
}

// Numbers of buffers, the lowest free one first.
class BufferPool {
 public:
  int take() {
    const auto free = std::find(used_.begin(), used_.end(), false);
    const auto index = static_cast<std::size_t>(free - used_.begin());
    if (free == used_.end()) used_.push_back(true);
    used_[index] = true;
    return static_cast<int>(index);
  }
  void give(int buffer) { used_[static_cast<std::size_t>(buffer)] = false; }
  int size() const { return static_cast<int>(used_.size()); }

 private:
  std::vector<bool> used_;
};

// What the ranks do in each tick.
class Play {
 public:
  explicit Play(const PipelineShape& shape)
      : shape_(shape),
        forwards_(unit_order(shape, false)),
        backwards_(unit_order(shape, true)),
        forward_tick_(static_cast<std::size_t>(shape.pieces() * shape.micro_batches), kNever),
        backward_tick_(forward_tick_),
        ranks_(static_cast<std::size_t>(shape.stages)) {
    const std::size_t all = forwards_.size();
    const auto is_done = [&] {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](const Rank& rank) { return rank.backwards == all; });
    };
    for (int tick = 0; !is_done(); ++tick) {
      bool moved = false;
      for (int rank = 0; rank < shape.stages; ++rank) moved = advance(rank, tick) || moved;
      CHECK(moved,
            "[pipeline] {} stages, {} chunks and {} micro-batches come to a stand in tick {}",
            shape.stages, shape.chunks, shape.micro_batches, tick);
    }
  }

  struct Move {
    bool is_forward = false;
    int piece = 0;
    Unit unit;
  };
  // What `rank` does in `tick`; null if nothing.
  const Move* move(int rank, int tick) const {
    const auto& moves = ranks_[static_cast<std::size_t>(rank)].moves;
    if (tick >= static_cast<int>(moves.size())) return nullptr;
    const Move& found = moves[static_cast<std::size_t>(tick)];
    return found.unit.micro_batch < 0 ? nullptr : &found;
  }
  int ticks() const {
    std::size_t most = 0;
    for (const Rank& rank : ranks_) most = std::max(most, rank.moves.size());
    return static_cast<int>(most);
  }

 private:
  static constexpr int kNever = std::numeric_limits<int>::max();
  struct Rank {
    std::size_t forwards = 0;  // made so far
    std::size_t backwards = 0;
    std::vector<Move> moves;  // one per tick; micro-batch -1 where idle
  };

  int& tick_of(std::vector<int>& ticks, int piece, int micro_batch) {
    return ticks[static_cast<std::size_t>(piece * shape_.micro_batches + micro_batch)];
  }
  int piece_of(int rank, const Unit& unit) const { return unit.chunk * shape_.stages + rank; }

  bool can_go_forward(int rank, int tick) {
    const Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (state.forwards == forwards_.size()) return false;
    if (static_cast<int>(state.forwards - state.backwards) >= in_flight_limit(shape_, rank))
      return false;
    const Unit& unit = forwards_[state.forwards];
    const int piece = piece_of(rank, unit);
    return piece == 0 || tick_of(forward_tick_, piece - 1, unit.micro_batch) < tick;
  }
  bool can_go_backward(int rank, int tick) {
    const Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (state.backwards == backwards_.size()) return false;
    const Unit& unit = backwards_[state.backwards];
    const int piece = piece_of(rank, unit);
    if (tick_of(forward_tick_, piece, unit.micro_batch) >= tick) return false;
    return piece + 1 == shape_.pieces() ||
           tick_of(backward_tick_, piece + 1, unit.micro_batch) < tick;
  }

  bool advance(int rank, int tick) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    Move move;
    move.unit.micro_batch = -1;
    const bool waits_for_forwards =
        shape_.kind == PipelineKind::kGPipe && state.forwards < forwards_.size();
    // Forward first, up to the limit: a steady rank then takes turns, and the next ranks are fed
    // early.
    if (can_go_forward(rank, tick)) {
      move.is_forward = true;
      move.unit = forwards_[state.forwards++];
    } else if (!waits_for_forwards && can_go_backward(rank, tick)) {
      move.unit = backwards_[state.backwards++];
    }
    const bool moved = move.unit.micro_batch >= 0;
    if (moved) {
      move.piece = piece_of(rank, move.unit);
      tick_of(move.is_forward ? forward_tick_ : backward_tick_, move.piece, move.unit.micro_batch) =
          tick;
    }
    state.moves.push_back(move);
    return moved;
  }

  PipelineShape shape_;
  std::vector<Unit> forwards_;
  std::vector<Unit> backwards_;
  std::vector<int> forward_tick_;  // [piece][micro-batch]
  std::vector<int> backward_tick_;
  std::vector<Rank> ranks_;
};

// Turns one rank's moves into its list, with numbered buffers.
class ListMaker {
 public:
  ListMaker(const PipelineShape& shape, int rank) : shape_(shape), rank_(rank) {
    const auto count = static_cast<std::size_t>(shape.micro_batches);
    const auto chunks = static_cast<std::size_t>(shape.chunks);
    activations_.resize(chunks);
    held_.assign(chunks, std::vector<Held>(count));
    batch_of_.assign(count, -1);
  }

  PipelineSchedule make(const Play& play) {
    PipelineSchedule schedule;
    schedule.ticks = play.ticks();
    for (int tick = 0; tick < schedule.ticks; ++tick) {
      const Play::Move* own = play.move(rank_, tick);
      if (own != nullptr) schedule.actions.push_back(compute(*own));
      PipelineAction exchange;
      exchange.kind = PipelineAction::Kind::kExchange;
      if (own != nullptr) add_send(*own, schedule.actions.back(), exchange);
      for (int peer = 0; peer < shape_.stages; ++peer) {
        const Play::Move* move = play.move(peer, tick);
        if (peer != rank_ && move != nullptr) add_receive(*move, peer, exchange);
      }
      if (own != nullptr) give_back(*own);
      if (!exchange.transfers.empty()) schedule.actions.push_back(std::move(exchange));
    }
    for (const BufferPool& pool : activations_) schedule.buffers.activations.push_back(pool.size());
    schedule.buffers.inputs = inputs_.size();
    schedule.buffers.outputs = std::min(outputs_used_, kOutputs);
    schedule.buffers.gradients = gradients_.size();
    schedule.buffers.batches = batches_.size();
    return schedule;
  }

 private:
  // One is sent while the next is written.
  static constexpr int kOutputs = 2;
  struct Held {
    int activations = -1;
    int input = -1;
    int gradient = -1;
  };
  Held& held(const Unit& unit) {
    return held_[static_cast<std::size_t>(unit.chunk)][static_cast<std::size_t>(unit.micro_batch)];
  }
  bool is_last(int piece) const { return piece + 1 == shape_.pieces(); }

  PipelineAction compute(const Play::Move& move) {
    Held& own = held(move.unit);
    int& batch = batch_of_[static_cast<std::size_t>(move.unit.micro_batch)];
    PipelineAction action;
    action.kind =
        move.is_forward ? PipelineAction::Kind::kForward : PipelineAction::Kind::kBackward;
    action.micro_batch = move.unit.micro_batch;
    action.chunk = move.unit.chunk;
    action.starts = batch < 0;
    if (batch < 0) batch = batches_.take();
    if (move.is_forward) {
      own.activations = activations_[static_cast<std::size_t>(move.unit.chunk)].take();
      if (is_last(move.piece)) {
        own.gradient = gradients_.take();
      } else {
        action.output = outputs_used_++ % kOutputs;
      }
    }
    action.batch = batch;
    action.activations = own.activations;
    action.input = own.input;
    if (!move.is_forward || is_last(move.piece)) action.gradient = own.gradient;
    return action;
  }

  void add_send(const Play::Move& move, const PipelineAction& action,
                PipelineAction& exchange) const {
    if (move.is_forward ? is_last(move.piece) : move.piece == 0) return;
    PipelineTransfer transfer;
    transfer.is_send = true;
    transfer.is_gradient = !move.is_forward;
    transfer.peer = (rank_ + (move.is_forward ? 1 : shape_.stages - 1)) % shape_.stages;
    transfer.micro_batch = move.unit.micro_batch;
    transfer.chunk = move.unit.chunk;
    transfer.buffer = move.is_forward ? action.output : action.gradient;
    exchange.transfers.push_back(transfer);
  }

  void add_receive(const Play::Move& move, int peer, PipelineAction& exchange) {
    if (move.is_forward ? is_last(move.piece) : move.piece == 0) return;
    const int piece = move.is_forward ? move.piece + 1 : move.piece - 1;
    if (piece % shape_.stages != rank_) return;
    const Unit unit{move.unit.micro_batch, piece / shape_.stages};
    PipelineTransfer transfer;
    transfer.is_gradient = !move.is_forward;
    transfer.peer = peer;
    transfer.micro_batch = unit.micro_batch;
    transfer.chunk = unit.chunk;
    int& buffer = move.is_forward ? held(unit).input : held(unit).gradient;
    buffer = move.is_forward ? inputs_.take() : gradients_.take();
    transfer.buffer = buffer;
    exchange.transfers.push_back(transfer);
  }

  void give_back(const Play::Move& move) {
    if (move.is_forward) return;
    const Held& own = held(move.unit);
    activations_[static_cast<std::size_t>(move.unit.chunk)].give(own.activations);
    if (own.input >= 0) inputs_.give(own.input);
    gradients_.give(own.gradient);
    if (move.unit.chunk == 0)
      batches_.give(batch_of_[static_cast<std::size_t>(move.unit.micro_batch)]);
  }

  PipelineShape shape_;
  int rank_;
  std::vector<BufferPool> activations_;
  BufferPool inputs_;
  BufferPool gradients_;
  BufferPool batches_;
  int outputs_used_ = 0;
  std::vector<std::vector<Held>> held_;  // [chunk][micro-batch]
  std::vector<int> batch_of_;            // [micro-batch]
};

}  // namespace

PipelineSchedule pipeline_schedule(const PipelineShape& shape, int rank) {
  CHECK(shape.stages >= 1 && shape.chunks >= 1 && shape.micro_batches >= 1 && rank >= 0 &&
            rank < shape.stages,
        "[pipeline] rank {} of {} stages with {} chunks and {} micro-batches", rank, shape.stages,
        shape.chunks, shape.micro_batches);
  CHECK_USER(shape.chunks == 1 || (shape.kind == PipelineKind::kInterleaved && shape.stages > 1),
             "[pipeline] parallel.virtual_stages is {}; it needs parallel.pipeline above 1 and "
             "parallel.pipeline_schedule interleaved",
             shape.chunks);
  return ListMaker(shape, rank).make(Play(shape));
}

PipelineBuffers pipeline_buffers(const PipelineShape& shape, int rank) {
  PipelineBuffers most = pipeline_schedule(shape, rank).buffers;
  if (shape.kind != PipelineKind::kInterleaved) return most;
  // What a list needs follows from its start, its end and the size of its last group: beyond a few
  // groups only the latter still matters.
  const int few = 4 * shape.stages;
  for (int count = 1; count < shape.micro_batches; ++count) {
    if (count == few && shape.micro_batches - shape.stages > few) {
      count = shape.micro_batches - shape.stages;
    }
    PipelineShape fewer = shape;
    fewer.micro_batches = count;
    const PipelineBuffers some = pipeline_schedule(fewer, rank).buffers;
    most.inputs = std::max(most.inputs, some.inputs);
    most.outputs = std::max(most.outputs, some.outputs);
    most.gradients = std::max(most.gradients, some.gradients);
    most.batches = std::max(most.batches, some.batches);
    for (std::size_t chunk = 0; chunk < some.activations.size(); ++chunk) {
      most.activations[chunk] = std::max(most.activations[chunk], some.activations[chunk]);
    }
  }
  return most;
}

}  // namespace tessera
