// What ranks tell each other around a save: a small record of every rank to all, by one collective.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/error.h"
#include "engine/device/buffer.h"
#include "parallel/communicator.h"

namespace tessera {

struct RankRecord {
  bool is_ok = true;
  ErrorKind kind = ErrorKind::kTransient;
  std::array<std::uint64_t, 4> values{};
  std::string text;  // cut to RankExchange::kLongestText bytes

  // Of the exception in flight; for use in a catch block.
  static RankRecord of_current_exception();
};

class RankExchange {
 public:
  static constexpr std::size_t kLongestText = 976;

  // `world` and the context of `stream` outlive this.
  RankExchange(Communicator& world, Stream& stream);

  // Collective: the record of every rank, by rank. Blocks until all have called.
  std::vector<RankRecord> gather(const RankRecord& own, Stream& stream);

 private:
  Communicator* world_;
  Buffer own_;       // on the device
  Buffer all_;       // on the device
  Buffer own_host_;
  Buffer all_host_;
};

// The lowest rank with an error, or -1.
int first_failed(const std::vector<RankRecord>& records);

}  // namespace tessera
