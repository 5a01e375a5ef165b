#include "data/batch.h"

#include <algorithm>

namespace tessera {

void sort_tokens(std::span<const std::int32_t> inputs, std::vector<std::int32_t>& order) {
  // (token, place) in one word: a plain sort of words is then the stable sort that is wanted.
  std::vector<std::uint64_t> keys(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    keys[i] = (static_cast<std::uint64_t>(static_cast<std::uint32_t>(inputs[i])) << 32) | i;
  }
  std::sort(keys.begin(), keys.end());
  order.resize(inputs.size());
  for (std::size_t i = 0; i < keys.size(); ++i) order[i] = static_cast<std::int32_t>(keys[i]);
}

}  // namespace tessera
