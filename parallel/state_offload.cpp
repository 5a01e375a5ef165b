#include "parallel/state_offload.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {
namespace {

// Elements [begin, begin + count) of a shard's tensor that has one entry for every `per` elements.
Tensor cut(const Tensor& tensor, std::int64_t begin, std::int64_t count, std::int64_t per = 1) {
  return tensor.defined() ? tensor.flat_slice(begin / per, count / per) : Tensor{};
}

ShardState cut(const ShardState& shard, std::int64_t begin, std::int64_t count) {
  ShardState piece;
  piece.weight = cut(shard.weight, begin, count);
  piece.master = cut(shard.master, begin, count);
  piece.gradient = cut(shard.gradient, begin, count);
  piece.m = cut(shard.m, begin, count);
  piece.v = cut(shard.v, begin, count);
  piece.m_scale = cut(shard.m_scale, begin, count, kMomentBlock);
  piece.v_scale = cut(shard.v_scale, begin, count, kMomentBlock);
  return piece;
}

// The segments' parts within [begin, begin + count), counted from `begin`.
std::vector<ShardSegment> cut(const std::vector<ShardSegment>& segments, std::int64_t begin,
                              std::int64_t count) {
  std::vector<ShardSegment> result;
  for (ShardSegment segment : segments) {
    const std::int64_t from = std::max(segment.begin, begin);
    const std::int64_t to = std::min(segment.end, begin + count);
    if (from >= to) continue;
    segment.local_begin += from - segment.begin;
    segment.begin = from - begin;
    segment.end = to - begin;
    result.push_back(segment);
  }
  return result;
}

}  // namespace

StateOffload::StateOffload(ParamStore& store, Stream& compute, Stream& in, Stream& out,
                           Arena& arena)
    : store_(&store), compute_(&compute), in_(&in), out_(&out) {
  if (!store.options().trains) return;
  moves_masters_ = store.options().offloads_masters && store.has_masters();
  moves_moments_ = store.options().offloads_moments;
  CHECK(store.options().offload_piece % kShardAlignment == 0,
        "[state_offload] pieces of {} elements, expected a multiple of {}",
        store.options().offload_piece, kShardAlignment);
  std::int64_t largest = 0;
  for (int b = 0; b < store.num_shards(); ++b) {
    const std::int64_t size = store.layout(b).shard_size;
    const std::int64_t step = is_on() ? store.options().offload_piece : size;
    for (std::int64_t begin = 0; begin < size; begin += step) {
      Piece piece{b, begin, std::min(step, size - begin), store.shard(b).segments, {}};
      largest = std::max(largest, piece.count);
      if (piece.count < size) {
        piece.table = cut(store.segments(b), begin, piece.count);
        piece.segments = arena.allocate(
            fmt::format("segments {} from {}", store.bucket(b).name, begin), DType::kU8,
            Shape{static_cast<std::int64_t>(piece.table.size() * sizeof(ShardSegment))},
            MemoryClass::kOptimizer);
      }
      pieces_.push_back(std::move(piece));
    }
  }
  if (!is_on()) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const auto take = [&](const char* what, const Tensor& like, std::int64_t per = 1) {
      if (!like.defined()) return Tensor{};
      return arena.allocate(fmt::format("staged {} {}", what, i), like.dtype, Shape{largest / per},
                            MemoryClass::kOptimizer);
    };
    const ShardState& shard = store.shard(0);
    if (moves_masters_) slot.state.master = take("masters", shard.master);
    if (moves_moments_) {
      slot.state.m = take("adam m", shard.m);
      slot.state.v = take("adam v", shard.v);
      slot.state.m_scale = take("adam m scales", shard.m_scale, kMomentBlock);
      slot.state.v_scale = take("adam v scales", shard.v_scale, kMomentBlock);
    }
    slot.loaded = compute.context().make_event();
    slot.updated = compute.context().make_event();
    slot.stored = compute.context().make_event();
  }
}

void StateOffload::initialize(Stream& stream) {
  for (const Piece& piece : pieces_) {
    if (piece.table.empty()) continue;
    stream.copy_bytes(piece.segments.data, piece.table.data(), piece.segments.bytes());
  }
  stream.synchronize();
}

template <typename Copy>
void StateOffload::for_each_moved(const Piece& piece, const Slot& slot, Copy&& copy) const {
  const ShardState staged = cut(slot.state, 0, piece.count);
  const ShardState host = cut(store_->shard(piece.bucket), piece.begin, piece.count);
  const auto visit = [&](Tensor ShardState::*member) {
    if ((staged.*member).defined()) copy(staged.*member, host.*member);
  };
  visit(&ShardState::master);
  visit(&ShardState::m);
  visit(&ShardState::v);
  visit(&ShardState::m_scale);
  visit(&ShardState::v_scale);
}

void StateOffload::load(std::size_t index) {
  const Piece& piece = pieces_[index];
  Slot& slot = this->slot(index);
  // What the slot held has gone out, and with it all earlier pieces.
  if (in_ != out_) in_->wait(*slot.stored);
  for_each_moved(piece, slot, [&](const Tensor& staged, const Tensor& host) {
    in_->copy_bytes(staged.data, host.data, host.bytes());
  });
  if (in_ != compute_) in_->record(*slot.loaded);
}

void StateOffload::store_back(std::size_t index) {
  const Piece& piece = pieces_[index];
  Slot& slot = this->slot(index);
  if (out_ != compute_) {
    compute_->record(*slot.updated);
    out_->wait(*slot.updated);
  }
  for_each_moved(piece, slot, [&](const Tensor& staged, const Tensor& host) {
    out_->copy_bytes(host.data, staged.data, host.bytes());
  });
  out_->record(*slot.stored);
}

ShardState StateOffload::view(const Piece& piece, const Slot& slot) const {
  ShardState state = cut(store_->shard(piece.bucket), piece.begin, piece.count);
  const ShardState staged = cut(slot.state, 0, piece.count);
  for (Tensor ShardState::*member : {&ShardState::master, &ShardState::m, &ShardState::v,
                                     &ShardState::m_scale, &ShardState::v_scale}) {
    if ((staged.*member).defined()) state.*member = staged.*member;
  }
  state.segments = piece.segments;
  return state;
}

void StateOffload::update(const Visit& visit) {
  if (!is_on()) {
    for (int b = 0; b < store_->num_shards(); ++b) visit(store_->shard(b));
    return;
  }
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i == 0) load(0);
    if (i + 1 < pieces_.size()) load(i + 1);
    Slot& slot = this->slot(i);
    if (in_ != compute_) compute_->wait(*slot.loaded);
    visit(view(pieces_[i], slot));
    store_back(i);
  }
  // The states are read from host memory next, by a save or by the next update.
  if (out_ != compute_ && !pieces_.empty()) {
    compute_->wait(*this->slot(pieces_.size() - 1).stored);
  }
}

void StateOffload::read_masters(const Visit& visit) {
  if (!moves_masters_) {
    for (int b = 0; b < store_->num_shards(); ++b) visit(store_->shard(b));
    return;
  }
  Slot& slot = slots_.front();
  for (const Piece& piece : pieces_) {
    const ShardState state = view(piece, slot);
    const Tensor host = cut(store_->shard(piece.bucket).master, piece.begin, piece.count);
    compute_->copy_bytes(state.master.data, host.data, host.bytes());
    visit(state);
  }
}

}  // namespace tessera
