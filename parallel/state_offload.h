// StateOffload: how an update reaches a rank's shards. Masters and moments that lie in host memory
// (ParamStoreOptions) come to the device in pieces: while piece k is updated, piece k + 1 comes in
// and piece k - 1 goes out, on two streams of their own, so that the update lasts as long as the
// slower direction of the link needs. Where everything lies on the device the pieces are the shards
// themselves.
//
// An update of an element depends on no other but, with 8-bit moments, those of its block, and pieces
// hold whole blocks: the numbers are those of an update in place, to the bit.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/device/stream.h"
#include "engine/memory/arena.h"
#include "parallel/param_store.h"

namespace tessera {

class StateOffload {
 public:
  // Takes its staging memory, three pieces', from `arena`. `in` and `out` may be the compute stream
  // itself. All references outlive this.
  StateOffload(ParamStore& store, Stream& compute, Stream& in, Stream& out, Arena& arena);

  bool is_on() const { return moves_masters_ || moves_moments_; }
  // Uploads the tables of pieces. Blocks.
  void initialize(Stream& stream);

  // Calls visit with every piece of every shard, all of it on the device and flat; visit enqueues
  // its work on the compute stream, which then waits until the last piece is in host memory again.
  using Visit = std::function<void(const ShardState& piece)>;
  void update(const Visit& visit);
  // The same for reading `master` and writing `weight` alone, in order on the compute stream.
  void read_masters(const Visit& visit);

  // fp32 memory on the device for start-up, while no update is under way; undefined where nothing
  // is moved.
  Tensor staging() const { return slots_.front().state.master; }

 private:
  struct Piece {
    int bucket = 0;
    std::int64_t begin = 0;  // of the shard
    std::int64_t count = 0;
    Tensor segments;
    std::vector<ShardSegment> table;  // empty where the shard's own holds
  };
  struct Slot {
    ShardState state;                 // the staged tensors, as large as the largest piece
    std::unique_ptr<Event> loaded;    // on `in`
    std::unique_ptr<Event> updated;   // on the compute stream
    std::unique_ptr<Event> stored;    // on `out`
  };
  // Calls copy(staged, host) for each tensor of a piece that is moved.
  template <typename Copy>
  void for_each_moved(const Piece& piece, const Slot& slot, Copy&& copy) const;
  Slot& slot(std::size_t piece) { return slots_[piece % slots_.size()]; }
  void load(std::size_t piece);
  void store_back(std::size_t piece);
  // A piece as visit gets it.
  ShardState view(const Piece& piece, const Slot& slot) const;

  ParamStore* store_;
  Stream* compute_;
  Stream* in_;
  Stream* out_;
  bool moves_masters_ = false;
  bool moves_moments_ = false;
  std::vector<Piece> pieces_;
  std::array<Slot, 3> slots_;
};

}  // namespace tessera
