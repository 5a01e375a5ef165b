#include "tests/parallel/overlap_harness.h"

#include <cstring>

#include "engine/device/buffer.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"
#include "parallel/overlap.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kRows = 5;  // of each rank
constexpr std::int64_t kIn = 24;
constexpr std::int64_t kOut = 16;

std::vector<float> values_of(const Tensor& tensor, Stream& stream) {
  std::vector<float> values(static_cast<std::size_t>(tensor.numel()));
  stream.copy_bytes(values.data(), tensor.data, tensor.bytes());
  stream.synchronize();
  return values;
}

class Matrix {
 public:
  Matrix(BackendContext& context, std::int64_t rows, std::int64_t cols)
      : memory_(context, static_cast<std::size_t>(rows * cols) * sizeof(float)),
        tensor_(memory_.data(), DType::kF32, Shape{rows, cols}, memory_.device()) {}
  const Tensor& operator*() const { return tensor_; }
  void set(const std::vector<float>& values, Stream& stream) const {
    stream.copy_bytes(tensor_.data, values.data(), tensor_.bytes());
    stream.synchronize();
  }
  std::vector<float> get(Stream& stream) const { return values_of(tensor_, stream); }

 private:
  Buffer memory_;
  Tensor tensor_;
};

// Element i of what rank `rank` holds in a round: small integers, whose products and sums are
// exact, or fractions, of which every order of adding has bits of its own.
float element(int rank, std::int64_t i, int round, bool is_exact) {
  const auto mixed = static_cast<int>((i * 7 + rank * 31 + round * 13) % 17) - 8;
  return is_exact ? static_cast<float>(mixed) : static_cast<float>(mixed) / 7.0f;
}

std::vector<float> elements(int rank, std::int64_t count, int round, bool is_exact) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(element(rank, i, round, is_exact));
  return values;
}

Gemm product(const Tensor& x, const Tensor& w, const Tensor& y) {
  Gemm args;
  args.a = x;
  args.b = w;
  args.c = y;
  args.transpose_b = true;
  return args;
}

// Both directions, chunked and not, on the given streams; what came out of all.
std::vector<std::vector<float>> run_round(RankEnv& env, Overlap& overlap, Stream& compute, int round,
                                          bool is_exact) {
  const int size = env.world.size();
  const int rank = env.world.rank();
  const std::int64_t all = kRows * size;
  const Matrix own(env.context, kRows, kIn);
  const Matrix weight(env.context, kOut, kIn);
  const ScratchTensor whole(compute, DType::kF32, Shape{all, kIn});
  const ScratchTensor gathered(compute, DType::kF32, Shape{all, kIn});
  const Matrix y(env.context, all, kOut);
  const Matrix sums(env.context, kRows, kOut);
  const Matrix scattered(env.context, kRows, kOut);
  own.set(elements(rank, kRows * kIn, round, is_exact), compute);
  weight.set(elements(rank + 100, kOut * kIn, round, is_exact), compute);
  const auto rows = [&](const Tensor& t, int r) { return t.row_slice(r * kRows, kRows); };

  std::vector<int> order;
  overlap.gather_gemm(*own, *whole, [&](int r, const Tensor& piece) {
    order.push_back(r);
    gemm(product(piece, *weight, rows(*y, r)), compute);
  });
  overlap.gemm_scatter(*sums, [&](int r, const Tensor& summand) {
    order.push_back(r);
    gemm(product(rows(*whole, r), *weight, summand), compute);
  });
  for (int i = 0; i < size; ++i) {
    REQUIRE_THAT(order[static_cast<std::size_t>(i)] == (rank + i) % size,
                 "product {} of the gather is of rank {}", i, order[static_cast<std::size_t>(i)]);
    REQUIRE_THAT(order[static_cast<std::size_t>(size + i)] == (rank + i + 1) % size,
                 "product {} of the scatter is of rank {}", i,
                 order[static_cast<std::size_t>(size + i)]);
  }
  overlap.start_gather(*own, *gathered);
  overlap.start_scatter(*y, *scattered);
  overlap.finish_gather();
  overlap.finish_scatter();
  return {values_of(*whole, compute), y.get(compute), sums.get(compute),
          values_of(*gathered, compute), scattered.get(compute)};
}

// What run_round gives, of integers.
std::vector<std::vector<float>> wanted_round(int rank, int size, int round) {
  std::vector<float> whole;
  for (int r = 0; r < size; ++r) {
    const std::vector<float> own = elements(r, kRows * kIn, round, true);
    whole.insert(whole.end(), own.begin(), own.end());
  }
  const auto multiply = [&](int weight_of) {
    const std::vector<float> w = elements(weight_of + 100, kOut * kIn, round, true);
    std::vector<float> y;
    for (std::int64_t i = 0; i < kRows * size; ++i) {
      for (std::int64_t j = 0; j < kOut; ++j) {
        float sum = 0;
        for (std::int64_t k = 0; k < kIn; ++k) {
          sum += whole[static_cast<std::size_t>(i * kIn + k)] *
                 w[static_cast<std::size_t>(j * kIn + k)];
        }
        y.push_back(sum);
      }
    }
    return y;
  };
  std::vector<float> sums(static_cast<std::size_t>(kRows * kOut));
  for (int r = 0; r < size; ++r) {
    const std::vector<float> y = multiply(r);
    const std::size_t begin = static_cast<std::size_t>(rank) * sums.size();
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += y[begin + i];
  }
  return {whole, multiply(rank), sums, whole, sums};
}

}  // namespace

void run_overlap(RankEnv& env) {
  const auto compute = env.context.make_stream("compute");
  const auto exchange = env.context.make_stream("exchange");
  const Tensor any(nullptr, DType::kF32, Shape{kRows * env.world.size(), kIn}, compute->device());
  const Tensor weight(nullptr, DType::kF32, Shape{kOut, kIn}, compute->device());
  const Tensor out(nullptr, DType::kF32, Shape{any.rows(), kOut}, compute->device());
  // The library may want room for products.
  const ScratchStack scratch(*compute, workspace(product(any, weight, out), env.context.capabilities()) +
                                           (std::size_t{1} << 16));
  Overlap on(env.world, *compute, *exchange);
  Overlap off(env.world, *compute, *compute);
  Overlap puts(env.world, *compute, *exchange, true);
  constexpr const char* kNames[] = {"whole", "gather_gemm", "gemm_scatter", "gather", "scatter"};
  for (int round = 0; round < 2; ++round) {
    for (const bool is_exact : {true, false}) {
      const auto got = run_round(env, on, *compute, round, is_exact);
      const auto serial = run_round(env, off, *compute, round, is_exact);
      const auto copied = run_round(env, puts, *compute, round, is_exact);
      const auto wanted = is_exact ? wanted_round(env.world.rank(), env.world.size(), round) : serial;
      for (std::size_t i = 0; i < got.size(); ++i) {
        REQUIRE_THAT(got[i] == wanted[i], "{} of round {} is not what was wanted", kNames[i], round);
        REQUIRE_THAT(std::memcmp(got[i].data(), serial[i].data(), got[i].size() * sizeof(float)) == 0,
                     "{} of round {} has other bits on one stream", kNames[i], round);
        REQUIRE_THAT(std::memcmp(got[i].data(), copied[i].data(), got[i].size() * sizeof(float)) == 0,
                     "{} of round {} has other bits through a window", kNames[i], round);
      }
    }
  }
}

}  // namespace tessera::test
