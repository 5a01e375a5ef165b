#include "checkpoint/rank_exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <type_traits>

namespace tessera {
namespace {

struct Packed {
  std::uint32_t is_ok;
  std::uint32_t kind;
  std::uint64_t values[4];
  std::uint64_t text_bytes;
  char text[RankExchange::kLongestText];
};
static_assert(std::is_trivially_copyable_v<Packed> && sizeof(Packed) == 1024);

}  // namespace

RankRecord RankRecord::of_current_exception() {
  RankRecord record;
  record.is_ok = false;
  try {
    throw;
  } catch (const Error& error) {
    record.kind = error.kind();
    record.text = error.what();
  } catch (const std::exception& error) {
    record.kind = ErrorKind::kInternal;
    record.text = error.what();
  } catch (...) {
    record.kind = ErrorKind::kInternal;
    record.text = "an exception without a text";
  }
  return record;
}

RankExchange::RankExchange(Communicator& world, Stream& stream) : world_(&world) {
  const std::size_t all = sizeof(Packed) * static_cast<std::size_t>(world.size());
  own_ = Buffer(stream.context(), sizeof(Packed));
  all_ = Buffer(stream.context(), all);
  own_host_ = Buffer(stream.context(), sizeof(Packed), MemoryKind::kPinnedHost);
  all_host_ = Buffer(stream.context(), all, MemoryKind::kPinnedHost);
}

std::vector<RankRecord> RankExchange::gather(const RankRecord& own, Stream& stream) {
  Packed packed{};
  packed.is_ok = own.is_ok ? 1 : 0;
  packed.kind = static_cast<std::uint32_t>(own.kind);
  std::copy(own.values.begin(), own.values.end(), packed.values);
  packed.text_bytes = std::min(own.text.size(), kLongestText);
  std::memcpy(packed.text, own.text.data(), packed.text_bytes);
  std::memcpy(own_host_.data(), &packed, sizeof(packed));

  const auto size = static_cast<std::int64_t>(sizeof(Packed));
  stream.copy_bytes(own_.data(), own_host_.data(), sizeof(Packed));
  world_->all_gather(Tensor(own_.data(), DType::kU8, {size}, own_.device()),
                     Tensor(all_.data(), DType::kU8, {size * world_->size()}, all_.device()), stream);
  stream.copy_bytes(all_host_.data(), all_.data(), all_host_.bytes());
  stream.synchronize();

  std::vector<RankRecord> records(static_cast<std::size_t>(world_->size()));
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    std::memcpy(&packed, static_cast<const char*>(all_host_.data()) + rank * sizeof(Packed),
                sizeof(Packed));
    records[rank].is_ok = packed.is_ok != 0;
    records[rank].kind = static_cast<ErrorKind>(packed.kind);
    std::copy(std::begin(packed.values), std::end(packed.values), records[rank].values.begin());
    records[rank].text.assign(packed.text, std::min<std::size_t>(packed.text_bytes, kLongestText));
  }
  return records;
}

int first_failed(const std::vector<RankRecord>& records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    if (!records[rank].is_ok) return static_cast<int>(rank);
  }
  return -1;
}

}  // namespace tessera
