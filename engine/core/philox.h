// Philox4x32-10 counter-based random numbers (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC11). A draw is a pure function of (seed, purpose, step, element), so every parallel
// layout, resume and recompute sees the same numbers. Plain C++: usable from host and device code.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera {

// What a stream of random numbers is for; two purposes never share a draw.
enum class RandomPurpose : std::uint32_t {
  kInit = 1,
  kShuffle = 2,
  kDropout = 3,
  kStochasticRounding = 4,
  kSampling = 5,
  kSynthetic = 6,
};

// Trivially copyable; passed by value to ops and kernels.
struct PhiloxKey {
  std::uint64_t seed = 0;
  std::uint32_t purpose = 0;  // RandomPurpose, mixed with a parameter or layer id by derive()
  std::uint32_t step = 0;
};

struct PhiloxBlock {
  std::uint32_t v[4];
};

TESSERA_HOST_DEVICE inline PhiloxBlock philox(const PhiloxKey& key, std::uint64_t counter) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter);
  std::uint32_t c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = key.purpose;
  std::uint32_t c3 = key.step;
  std::uint32_t k0 = static_cast<std::uint32_t>(key.seed);
  std::uint32_t k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return PhiloxBlock{{c0, c1, c2, c3}};
}

// 32 random bits of global element `index`: block index / 4, word index % 4.
TESSERA_HOST_DEVICE inline std::uint32_t philox_bits(const PhiloxKey& key, std::uint64_t index) {
  return philox(key, index >> 2).v[index & 3];
}

// Uniform in [0, 1) with 24 bits.
TESSERA_HOST_DEVICE inline float philox_uniform(const PhiloxKey& key, std::uint64_t index) {
  return static_cast<float>(philox_bits(key, index) >> 8) * 0x1p-24f;
}

// Standard normal by Box-Muller: elements 2k and 2k+1 share a pair of draws.
TESSERA_HOST_DEVICE inline float philox_normal(const PhiloxKey& key, std::uint64_t index) {
  const PhiloxBlock block = philox(key, index >> 1);
  // (0, 1]: the logarithm stays finite.
  const float u = (static_cast<float>(block.v[0] >> 8) + 1.0f) * 0x1p-24f;
  const float angle = static_cast<float>(block.v[1] >> 8) * 0x1p-24f * 6.28318530717958647692f;
  const float radius = sqrtf(-2.0f * logf(u));
  return radius * ((index & 1) ? sinf(angle) : cosf(angle));
}

// A key for `purpose` at `step`; `stream` separates independent users (parameter id, layer, ...).
inline PhiloxKey derive_key(std::uint64_t seed, RandomPurpose purpose, std::uint64_t step = 0,
                            std::uint64_t stream = 0) {
  // splitmix64 finaliser: neighbouring seeds and streams give unrelated keys.
  auto mix = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  PhiloxKey key;
  key.seed = mix(seed + 0x9e3779b97f4a7c15ull * (stream + 1));
  key.purpose = static_cast<std::uint32_t>(purpose) + (static_cast<std::uint32_t>(step >> 32) << 8);
  key.step = static_cast<std::uint32_t>(step);
  return key;
}

}  // namespace tessera
