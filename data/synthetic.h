// Random tokens for burn-in and measurements: nothing is stored, every token is a function of its
// place.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "data/token_store.h"

namespace tessera {

// "synthetic:ROWSxLENGTH" or "synthetic:ROWSxMIN-MAX" (lengths in tokens, uniform).
struct SyntheticSpec {
  std::int64_t rows = 0;
  std::int64_t min_length = 0;
  std::int64_t max_length = 0;
};

bool is_synthetic(const std::string& path);
SyntheticSpec parse_synthetic(const std::string& path);  // throws kUser

std::unique_ptr<TokenStore> make_synthetic_store(const SyntheticSpec& spec,
                                                 std::int64_t vocab_size);

}  // namespace tessera
