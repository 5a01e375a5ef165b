#include "tests/parallel/communicator_conformance.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "engine/device/buffer.h"
#include "engine/device/cpu/cpu_stream.h"
#include "kernels/ops.h"
#include "parallel/mesh.h"
#include "tests/parallel/overlap_harness.h"

namespace tessera::test {
namespace {

using Values = std::vector<double>;

thread_local BackendContext* operand_context = nullptr;

// Memory for `count` elements of a dtype, with guards behind it that no operation may touch. On a
// GPU what is set and read is a copy in host memory: it goes to the device when a tensor is asked
// for, and comes back when it is read after that.
class Data {
 public:
  Data(DType dtype, std::int64_t count) : dtype_(dtype), count_(count) {
    bytes_.assign(static_cast<std::size_t>(count) * size_of(dtype) + kGuard, kMark);
  }
  Data(DType dtype, const Values& values) : Data(dtype, static_cast<std::int64_t>(values.size())) {
    for (std::size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  Tensor tensor() { return slice(0, count_); }
  Tensor slice(std::int64_t begin, std::int64_t count) {
    unsigned char* base = bytes_.data();
    Device device;
    if (operand_context != nullptr) {
      upload();
      base = static_cast<unsigned char*>(buffer_.data());
      device = buffer_.device();
    }
    return {base + static_cast<std::size_t>(begin) * size_of(dtype_), dtype_, {count}, device};
  }
  void set(std::size_t i, double value) {
    download();
    is_newer_here_ = true;
    unsigned char* at = bytes_.data() + i * size_of(dtype_);
    const auto store = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
    switch (dtype_) {
      case DType::kF64:
        return store(value);
      case DType::kF32:
        return store(static_cast<float>(value));
      case DType::kBF16:
        return store(bf16(static_cast<float>(value)));
      case DType::kF16:
        return store(f16(static_cast<float>(value)));
      case DType::kI64:
        return store(static_cast<std::int64_t>(value));
      case DType::kI32:
        return store(static_cast<std::int32_t>(value));
      default:
        return store(static_cast<std::uint8_t>(value));
    }
  }
  double get(std::size_t i) {
    download();
    const unsigned char* at = bytes_.data() + i * size_of(dtype_);
    const auto load = [&](auto typed) {
      std::memcpy(&typed, at, sizeof typed);
      return typed;
    };
    switch (dtype_) {
      case DType::kF64:
        return load(double{});
      case DType::kF32:
        return load(float{});
      case DType::kBF16:
        return static_cast<float>(load(bf16{}));
      case DType::kF16:
        return static_cast<float>(load(f16{}));
      case DType::kI64:
        return static_cast<double>(load(std::int64_t{}));
      case DType::kI32:
        return load(std::int32_t{});
      default:
        return load(std::uint8_t{});
    }
  }
  Values values() {
    Values result(static_cast<std::size_t>(count_));
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = get(i);
    return result;
  }
  void check(const Values& wanted, const std::string& what) {
    download();
    REQUIRE_THAT(wanted.size() == static_cast<std::size_t>(count_), "{}: {} values, wanted {}",
                 what, count_, wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double value = get(i);
      const bool is_equal = value == wanted[i] || (std::isnan(value) && std::isnan(wanted[i]));
      REQUIRE_THAT(is_equal, "{}: element {} of {} is {}, wanted {}", what, i, count_, value,
                   wanted[i]);
    }
    for (std::size_t i = bytes_.size() - kGuard; i < bytes_.size(); ++i) {
      REQUIRE_THAT(bytes_[i] == kMark, "{}: memory behind the tensor was written", what);
    }
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kMark = 0xA5;

  void upload() {
    if (buffer_.data() == nullptr) buffer_ = Buffer(*operand_context, bytes_.size());
    if (is_newer_here_) copy(buffer_.data(), bytes_.data());
    is_newer_here_ = false;
    is_newer_there_ = true;
  }
  void download() {
    if (is_newer_there_) copy(bytes_.data(), buffer_.data());
    is_newer_there_ = false;
  }
  void copy(void* to, const void* from) const {
    const auto stream = operand_context->make_stream("operands");
    stream->copy_bytes(to, from, bytes_.size());
    stream->synchronize();
  }

  Buffer buffer_;  // on a device other than the CPU
  bool is_newer_here_ = true;
  bool is_newer_there_ = false;  // from when a tensor was given out until it is read
  DType dtype_;
  std::int64_t count_;
  std::vector<unsigned char> bytes_;
};

// Element i of rank r: integers stay small, fractions differ in size so that the order of a sum
// shows.
double element(DType dtype, int rank, std::int64_t i) {
  const std::uint64_t mixed = (static_cast<std::uint64_t>(i) * 2654435761u +
                               static_cast<std::uint64_t>(rank + 1) * 40503u) %
                              1000003u;
  const double unit = static_cast<double>(mixed) / 1000003.0 - 0.5;
  switch (dtype) {
    case DType::kI64:
    case DType::kI32:
      return std::floor(unit * 20000);
    case DType::kU8:
      return static_cast<double>(mixed % 200);
    default:
      break;
  }
  static constexpr double kScales[] = {0.01, 0.1, 1, 10, 100};
  return unit * kScales[(rank * 3 + i) % 5];
}

Values elements(DType dtype, int rank, std::int64_t count, std::int64_t first = 0) {
  Data rounded(dtype, count);
  for (std::int64_t i = 0; i < count; ++i) {
    rounded.set(static_cast<std::size_t>(i), element(dtype, rank, first + i));
  }
  return rounded.values();
}

// The element-wise reduction in rank order, in the accumulator of the dtype.
Values reduced(DType dtype, ReduceOp op, const std::vector<Values>& inputs) {
  Data result(dtype, static_cast<std::int64_t>(inputs[0].size()));
  for (std::size_t i = 0; i < inputs[0].size(); ++i) {
    const bool is_double = dtype == DType::kF64 || dtype == DType::kI64 || dtype == DType::kI32;
    double wide = inputs[0][i];
    float narrow = static_cast<float>(wide);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const double next = inputs[r][i];
      if (op == ReduceOp::kMax) {
        wide = std::isnan(wide) || wide > next ? wide : next;
        narrow = static_cast<float>(wide);
      } else {
        wide += next;
        narrow += static_cast<float>(next);
      }
    }
    result.set(i, is_double ? wide : narrow);
  }
  return result.values();
}

constexpr DType kReducible[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kI64, DType::kI32};
constexpr DType kMovable[] = {DType::kF64, DType::kF32, DType::kBF16,
                              DType::kF16, DType::kI32, DType::kU8};
// Empty, one, below and above what travels inline, a prime.
constexpr std::int64_t kCounts[] = {0, 1, 7, 129, 1031};

std::string label(const char* op, DType dtype, std::int64_t count) {
  return fmt::format("{} {} x {}", op, name_of(dtype), count);
}

void run_all_reduce(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    for (const DType dtype : kReducible) {
      for (const std::int64_t count : kCounts) {
        std::vector<Values> inputs;
        for (int r = 0; r < env.world.size(); ++r) inputs.push_back(elements(dtype, r, count));
        Data data(dtype, inputs[static_cast<std::size_t>(env.world.rank())]);
        env.world.all_reduce(data.tensor(), op, *stream);
        stream->synchronize();
        data.check(reduced(dtype, op, inputs), label("all_reduce", dtype, count));
      }
    }
  }
  // A NaN of one rank reaches all, in a sum and in a maximum.
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    Data data(DType::kF32, Values(300, 1.0 + env.world.rank()));
    if (env.world.rank() == env.world.size() / 2) data.set(123, std::nan(""));
    env.world.all_reduce(data.tensor(), op, *stream);
    stream->synchronize();
    REQUIRE_THAT(std::isnan(data.get(123)) && !std::isnan(data.get(122)), "a NaN was lost");
  }
}

void run_all_gather(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  for (const DType dtype : kMovable) {
    for (const std::int64_t count : kCounts) {
      Values wanted;
      for (int r = 0; r < size; ++r) {
        const Values piece = elements(dtype, r, count);
        wanted.insert(wanted.end(), piece.begin(), piece.end());
      }
      Data in(dtype, elements(dtype, rank, count));
      Data out(dtype, count * size);
      env.world.all_gather(in.tensor(), out.tensor(), *stream);
      Data in_place(dtype, Values(static_cast<std::size_t>(count * size), 0));
      const Values own = elements(dtype, rank, count);
      for (std::int64_t i = 0; i < count; ++i) {
        in_place.set(static_cast<std::size_t>(rank * count + i), own[static_cast<std::size_t>(i)]);
      }
      env.world.all_gather(in_place.slice(rank * count, count), in_place.tensor(), *stream);
      stream->synchronize();
      out.check(wanted, label("all_gather", dtype, count));
      in_place.check(wanted, label("all_gather in place", dtype, count));
      in.check(own, "operand of all_gather");
    }
  }
}

void run_reduce_scatter(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    for (const DType dtype : kReducible) {
      for (const std::int64_t count : kCounts) {
        std::vector<Values> pieces;
        for (int r = 0; r < size; ++r) pieces.push_back(elements(dtype, r, count, rank * count));
        const Values wanted = reduced(dtype, op, pieces);
        const Values own = elements(dtype, rank, count * size);
        Data in(dtype, own);
        Data out(dtype, count);
        env.world.reduce_scatter(in.tensor(), out.tensor(), op, *stream);
        Data in_place(dtype, own);
        env.world.reduce_scatter(in_place.tensor(), in_place.slice(rank * count, count), op,
                                 *stream);
        stream->synchronize();
        out.check(wanted, label("reduce_scatter", dtype, count));
        in.check(own, "operand of reduce_scatter");
        const Values after = in_place.values();
        for (std::int64_t i = 0; i < count; ++i) {
          REQUIRE_THAT(after[static_cast<std::size_t>(rank * count + i)] ==
                           wanted[static_cast<std::size_t>(i)],
                       "{} in place differs at {}", label("reduce_scatter", dtype, count), i);
        }
      }
    }
  }
}

void run_all_to_all(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  for (const DType dtype : kMovable) {
    for (const std::int64_t count : kCounts) {
      Data in(dtype, elements(dtype, rank, count * size));
      Data out(dtype, count * size);
      Values wanted;
      for (int r = 0; r < size; ++r) {
        const Values piece = elements(dtype, r, count, rank * count);
        wanted.insert(wanted.end(), piece.begin(), piece.end());
      }
      env.world.all_to_all(in.tensor(), out.tensor(), *stream);
      stream->synchronize();
      out.check(wanted, label("all_to_all", dtype, count));
    }
  }
}

void run_broadcast(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  for (int root = 0; root < env.world.size(); ++root) {
    for (const DType dtype : {DType::kF32, DType::kU8}) {
      for (const std::int64_t count : kCounts) {
        Data data(dtype, elements(dtype, env.world.rank(), count));
        env.world.broadcast(data.tensor(), root, *stream);
        stream->synchronize();
        data.check(elements(dtype, root, count), label("broadcast", dtype, count));
      }
    }
  }
}

void run_send_recv(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  for (const std::int64_t count : kCounts) {
    // A ring: everyone sends and receives at once, two messages of different size, in order.
    Data first(DType::kF32, elements(DType::kF32, rank, count));
    Data second(DType::kI32, elements(DType::kI32, rank, count + 3));
    Data got_first(DType::kF32, count);
    Data got_second(DType::kI32, count + 3);
    {
      GroupScope group(env.world);
      env.world.send(first.tensor(), next, *stream);
      env.world.send(second.tensor(), next, *stream);
      env.world.recv(got_first.tensor(), previous, *stream);
      env.world.recv(got_second.tensor(), previous, *stream);
    }
    stream->synchronize();
    got_first.check(elements(DType::kF32, previous, count), label("ring", DType::kF32, count));
    got_second.check(elements(DType::kI32, previous, count + 3), label("ring", DType::kI32, count));

    // A pipeline without groups: what rank 0 holds passes through all.
    Data passed(DType::kF64, elements(DType::kF64, rank, count));
    if (rank > 0) env.world.recv(passed.tensor(), rank - 1, *stream);
    if (rank + 1 < size) env.world.send(passed.tensor(), rank + 1, *stream);
    stream->synchronize();
    passed.check(elements(DType::kF64, 0, count), label("chain", DType::kF64, count));
  }
  // All pairs at once, the own rank included; the receives come first.
  std::vector<Data> in;
  std::vector<Data> out;
  for (int r = 0; r < size; ++r) {
    in.emplace_back(DType::kF32, elements(DType::kF32, rank * size + r, 700));
    out.emplace_back(DType::kF32, 700);
  }
  {
    GroupScope group(env.world);
    for (int r = 0; r < size; ++r)
      env.world.recv(out[static_cast<std::size_t>(r)].tensor(), r, *stream);
    for (int r = 0; r < size; ++r)
      env.world.send(in[static_cast<std::size_t>(r)].tensor(), r, *stream);
  }
  stream->synchronize();
  for (int r = 0; r < size; ++r) {
    out[static_cast<std::size_t>(r)].check(elements(DType::kF32, r * size + rank, 700),
                                           "all pairs");
  }
}

// Tensors of several staging chunks, with sizes that divide neither them nor the ranks.
void run_large(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  const std::int64_t count = 300007;
  const auto value = [](int r, std::int64_t i) {
    return static_cast<std::int32_t>(i * 31 + r * 1000003);
  };
  const auto filled = [&](std::int64_t n, int r) {
    Data data(DType::kI32, n);
    for (std::int64_t i = 0; i < n; ++i) data.set(static_cast<std::size_t>(i), value(r, i));
    return data;
  };
  Data own = filled(count, rank);
  Data wide = filled(count * size, rank);
  Data sum = filled(count, rank);
  Data gathered(DType::kI32, count * size);
  Data scattered(DType::kI32, count);
  Data exchanged(DType::kI32, count * size);
  Data sent = filled(count, rank);
  Data passed(DType::kI32, count);
  env.world.all_reduce(sum.tensor(), ReduceOp::kMax, *stream);
  env.world.all_gather(own.tensor(), gathered.tensor(), *stream);
  env.world.reduce_scatter(wide.tensor(), scattered.tensor(), ReduceOp::kMax, *stream);
  env.world.all_to_all(wide.tensor(), exchanged.tensor(), *stream);
  env.world.broadcast(sent.tensor(), size - 1, *stream);
  {
    GroupScope group(env.world);
    env.world.send(own.tensor(), (rank + 1) % size, *stream);
    env.world.recv(passed.tensor(), (rank + size - 1) % size, *stream);
  }
  stream->synchronize();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    REQUIRE_THAT(sum.get(at) == value(size - 1, i), "large all_reduce differs at {}", i);
    REQUIRE_THAT(scattered.get(at) == value(size - 1, rank * count + i),
                 "large reduce_scatter differs at {}", i);
    REQUIRE_THAT(sent.get(at) == value(size - 1, i), "large broadcast differs at {}", i);
    REQUIRE_THAT(passed.get(at) == value((rank + size - 1) % size, i),
                 "large message differs at {}", i);
    for (int r = 0; r < size; ++r) {
      const auto there = static_cast<std::size_t>(r * count + i);
      REQUIRE_THAT(gathered.get(there) == value(r, i), "large all_gather differs at {} of {}", i,
                   r);
      REQUIRE_THAT(exchanged.get(there) == value(r, rank * count + i),
                   "large all_to_all differs at {} of {}", i, r);
    }
  }
}

// <x, y> summed over all ranks, in fp64.
double global_dot(RankEnv& env, Stream& stream, const Values& x, const Values& y) {
  Data sum(DType::kF64, Values{std::inner_product(x.begin(), x.end(), y.begin(), 0.0)});
  env.world.all_reduce(sum.tensor(), ReduceOp::kSum, stream);
  stream.synchronize();
  return sum.get(0);
}

void check_adjoint(double left, double right, const char* what) {
  REQUIRE_THAT(std::abs(left - right) <= 1e-10 * (1 + std::abs(left)),
               "{}: <Ax, y> is {}, <x, A'y> is {}", what, left, right);
}

void run_adjoints(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  const std::int64_t n = 257;
  const auto x_of = [&](std::int64_t count) { return elements(DType::kF64, rank, count); };
  const auto y_of = [&](std::int64_t count) {
    return elements(DType::kF64, rank + 100, count, 17);
  };
  const Values x = x_of(n);
  const Values y = y_of(n);
  const Values x_all = x_of(n * size);
  const Values y_all = y_of(n * size);

  {  // column-parallel input under sequence parallelism
    Data ax(DType::kF64, n * size);
    Data aty(DType::kF64, n);
    Data in(DType::kF64, x);
    Data back(DType::kF64, y_all);
    env.world.all_gather(in.tensor(), ax.tensor(), *stream);
    env.world.reduce_scatter(back.tensor(), aty.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    check_adjoint(global_dot(env, *stream, ax.values(), y_all),
                  global_dot(env, *stream, x, aty.values()), "all_gather / reduce_scatter");
  }
  {  // all_reduce forward, identity backward: the result and its gradient are equal on all ranks
    Data ax(DType::kF64, x);
    env.world.all_reduce(ax.tensor(), ReduceOp::kSum, *stream);
    Data same(DType::kF64, y);
    env.world.broadcast(same.tensor(), 0, *stream);
    stream->synchronize();
    const Values ax_values = ax.values();
    const Values y_same = same.values();
    const double left = std::inner_product(ax_values.begin(), ax_values.end(), y_same.begin(), 0.0);
    check_adjoint(left, global_dot(env, *stream, x, y_same), "all_reduce / identity");
  }
  {  // identity forward of a replicated tensor, all_reduce backward
    Data same(DType::kF64, x);
    env.world.broadcast(same.tensor(), 0, *stream);
    Data aty(DType::kF64, y);
    env.world.all_reduce(aty.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    const Values x_same = same.values();
    const Values aty_values = aty.values();
    const double right = std::inner_product(x_same.begin(), x_same.end(), aty_values.begin(), 0.0);
    check_adjoint(global_dot(env, *stream, x_same, y), right, "identity / all_reduce");
  }
  {  // broadcast and its adjoint, the sum at the root
    const int root = size - 1;
    Data ax(DType::kF64, x);
    env.world.broadcast(ax.tensor(), root, *stream);
    Data aty(DType::kF64, y);
    env.world.all_reduce(aty.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    const Values zero(static_cast<std::size_t>(n), 0.0);
    check_adjoint(global_dot(env, *stream, ax.values(), y),
                  global_dot(env, *stream, rank == root ? x : zero, aty.values()),
                  "broadcast / reduce");
  }
  {
    Data in(DType::kF64, x_all);
    Data ax(DType::kF64, n * size);
    Data back(DType::kF64, y_all);
    Data aty(DType::kF64, n * size);
    env.world.all_to_all(in.tensor(), ax.tensor(), *stream);
    env.world.all_to_all(back.tensor(), aty.tensor(), *stream);
    stream->synchronize();
    check_adjoint(global_dot(env, *stream, ax.values(), y_all),
                  global_dot(env, *stream, x_all, aty.values()), "all_to_all / all_to_all");
  }
  {  // a shift along the ring and back
    Data in(DType::kF64, x);
    Data ax(DType::kF64, n);
    Data back(DType::kF64, y);
    Data aty(DType::kF64, n);
    const int next = (rank + 1) % size;
    const int previous = (rank + size - 1) % size;
    {
      GroupScope group(env.world);
      env.world.send(in.tensor(), next, *stream);
      env.world.recv(ax.tensor(), previous, *stream);
    }
    {
      GroupScope group(env.world);
      env.world.send(back.tensor(), previous, *stream);
      env.world.recv(aty.tensor(), next, *stream);
    }
    stream->synchronize();
    check_adjoint(global_dot(env, *stream, ax.values(), y),
                  global_dot(env, *stream, x, aty.values()), "send / recv");
  }
}

void run_split(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const int size = env.world.size();
  const int rank = env.world.rank();
  {  // odd and even ranks, in reverse order
    const auto half = env.world.split(rank % 2, -rank, "half");
    const int members = (size + 1 - rank % 2) / 2;
    REQUIRE_THAT(half->size() == members && half->name() == "half", "half has {} ranks",
                 half->size());
    REQUIRE_THAT(half->rank() == members - 1 - rank / 2, "rank {} is {} in its half", rank,
                 half->rank());
    Data out(DType::kI32, members);
    Data in(DType::kI32, Values{static_cast<double>(rank)});
    half->all_gather(in.tensor(), out.tensor(), *stream);
    Data whole(DType::kI32, Values{1});
    env.world.all_reduce(whole.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    Values wanted;
    for (int i = members - 1; i >= 0; --i) wanted.push_back(2 * i + rank % 2);
    out.check(wanted, "all_gather in a half");
    whole.check(Values{static_cast<double>(size)}, "all_reduce of the world beside it");
    // A group of a group.
    const auto again = half->split(0, half->rank(), "again");
    Data sum(DType::kI64, Values(3000, 1));
    again->all_reduce(sum.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    sum.check(Values(3000, members), "all_reduce in a group of a group");
  }
  {  // the last rank stands aside
    const auto most = env.world.split(rank + 1 == size && size > 1 ? -1 : 0, 0, "most");
    REQUIRE_THAT((most == nullptr) == (rank + 1 == size && size > 1),
                 "a negative color got a group");
    if (most != nullptr) {
      Data sum(DType::kF32, Values{1});
      most->all_reduce(sum.tensor(), ReduceOp::kSum, *stream);
      stream->synchronize();
      sum.check(Values{static_cast<double>(most->size())}, "all_reduce without the last rank");
    }
  }
  {  // every rank names its own members
    const auto alone = env.world.subgroup({rank}, "alone");
    REQUIRE_THAT(alone->size() == 1 && alone->rank() == 0, "a group of one has {} ranks",
                 alone->size());
    Data in(DType::kF32, Values{3});
    Data out(DType::kF32, 1);
    alone->all_gather(in.tensor(), out.tensor(), *stream);
    alone->barrier();
    stream->synchronize();
    out.check(Values{3}, "all_gather of one");
  }
  env.world.barrier();
}

// Operations on several streams, ordered by events alone: a missing wait shows as a wrong value or
// under ThreadSanitizer.
void run_events(RankEnv& env) {
  const auto compute = env.context.make_stream("compute");
  const auto comm = env.context.make_stream("comm");
  const auto ready = env.context.make_event();
  const auto done = env.context.make_event();
  const int size = env.world.size();
  const bool is_cpu = env.context.device().kind == DeviceKind::kCpu;
  Data data(DType::kF32, 40000);
  const Tensor tensor = data.tensor();
  auto* values = tensor.as<float>();
  for (int round = 0; round < 6; ++round) {
    if (is_cpu) {
      cpu::as_cpu(*compute).enqueue([values, round, rank = env.world.rank()] {
        if (rank == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        for (int i = 0; i < 40000; ++i) values[i] = static_cast<float>(rank + round);
      });
    } else {
      FillNormal fill;
      fill.out = tensor;
      fill.global_cols = tensor.numel();
      fill.mean = static_cast<float>(env.world.rank() + round);
      fill_normal(fill, *compute);
    }
    compute->record(*ready);
    comm->wait(*ready);
    env.world.all_reduce(tensor, ReduceOp::kSum, *comm);
    comm->record(*done);
    compute->wait(*done);
    if (is_cpu) {
      cpu::as_cpu(*compute).enqueue([values] {
        for (int i = 0; i < 40000; ++i) values[i] *= 2;
      });
    } else {
      scale(Scale{tensor, tensor, 2.0}, *compute);
    }
    compute->synchronize();
    const double wanted = 2.0 * (size * (size - 1) / 2 + size * round);
    data.check(Values(40000, wanted), "all_reduce between two streams");
    data.tensor();  // what the device does next is read again
  }
}

// Two streams use one group; the order of issue holds although one of them is late.
void run_issue_order(RankEnv& env) {
  const auto slow = env.context.make_stream("slow");
  const auto fast = env.context.make_stream("fast");
  const int size = env.world.size();
  Data a(DType::kI64, Values(5000, 1));
  Data b(DType::kI64, Values(3, 1));
  for (int round = 0; round < 4; ++round) {
    Stream& first = (env.world.rank() + round) % 2 == 0 ? *slow : *fast;
    if (env.context.device().kind == DeviceKind::kCpu) {
      cpu::as_cpu(*slow).enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
    }
    env.world.all_reduce(a.tensor(), ReduceOp::kMax, first);
    env.world.all_reduce(b.tensor(), ReduceOp::kMax, &first == slow.get() ? *fast : *slow);
  }
  slow->synchronize();
  fast->synchronize();
  a.check(Values(5000, 1), "first");
  Data sum(DType::kI64, Values{1});
  env.world.all_reduce(sum.tensor(), ReduceOp::kSum, *fast);
  fast->synchronize();
  sum.check(Values{static_cast<double>(size)}, "after two streams");
}

void run_repeat(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const Values in = elements(DType::kF32, env.world.rank(), 9001);
  Values first;
  for (int round = 0; round < 10; ++round) {
    Data data(DType::kF32, in);
    if (env.world.rank() == round % env.world.size()) {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    if (round == 0) {
      first = data.values();
    } else {
      data.check(first, "repeated all_reduce");
    }
  }
}

void run_mesh(RankEnv& env) {
  // The world again, as tp x dp where it divides.
  const int size = env.world.size();
  const int tp = size % 2 == 0 ? 2 : 1;
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  const MeshShape shape{1, size / tp, 1, tp};
  ProcessMesh mesh(env.world.subgroup(all, "world"), shape);
  const auto stream = env.context.make_stream("comm");
  const auto sum = [&](Communicator& group) {
    Data data(DType::kI32, Values{static_cast<double>(mesh.world().rank())});
    group.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
    return data.get(0);
  };
  double tensor_sum = 0;
  double data_sum = 0;
  for (int r = 0; r < size; ++r) {
    if (r / tp == mesh.coordinate().data) tensor_sum += r;
    if (r % tp == mesh.coordinate().tensor) data_sum += r;
  }
  REQUIRE_THAT(sum(mesh.tensor()) == tensor_sum, "the tensor axis has other members");
  REQUIRE_THAT(sum(mesh.data()) == data_sum, "the data axis has other members");
  REQUIRE_THAT(sum(mesh.data_context()) == data_sum, "dp x cp has other members");
  REQUIRE_THAT(sum(mesh.model()) == tensor_sum, "pp x tp has other members");
  REQUIRE_THAT(mesh.pipeline().size() == 1 && mesh.context().size() == 1, "pp and cp are not 1");
}

// Runs `body`, which must fail as a disagreement whose text holds all `parts`.
template <typename Body>
void require_error(Body&& body, ErrorKind kind, const std::vector<std::string>& parts) {
  try {
    body();
  } catch (const Error& error) {
    for (const std::string& part : parts) {
      REQUIRE_THAT(std::string(error.what()).find(part) != std::string::npos,
                   "the error '{}' does not say '{}'", error.what(), part);
    }
    REQUIRE_THAT(error.kind() == kind, "the error '{}' has another kind", error.what());
    return;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "no error where one was due");
}

template <typename Body>
void require_aborted(Body&& body, const std::string& part) {
  try {
    body();
  } catch (const AbortedError& error) {
    REQUIRE_THAT(std::string(error.what()).find(part) != std::string::npos,
                 "the abort '{}' does not say '{}'", error.what(), part);
    return;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "no abort where one was due");
}

void end_other_operation(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, 64);
  Data out(DType::kF32, 64 * env.world.size());
  require_error(
      [&] {
        if (env.world.rank() == 1) {
          env.world.all_gather(data.tensor(), out.tensor(), *stream);
        } else {
          env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
        }
        stream->synchronize();
      },
      ErrorKind::kInternal, {"rank 0 calls all_reduce #1", "rank 1 calls all_gather #1"});
  // The group stays ended.
  require_aborted(
      [&] {
        env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
        stream->synchronize();
      },
      "disagree");
}

void end_other_dtype(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(env.world.rank() == 1 ? DType::kBF16 : DType::kF32, 5000);
  require_error(
      [&] {
        env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
        stream->synchronize();
      },
      ErrorKind::kInternal, {"fp32, 20000 bytes", "bf16, 10000 bytes"});
}

void end_other_count(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, env.world.rank() + 1 == env.world.size() ? 12 : 13000);
  require_error(
      [&] {
        env.world.broadcast(data.tensor(), 0, *stream);
        stream->synchronize();
      },
      ErrorKind::kInternal, {"52000 bytes", "48 bytes"});
}

void end_other_message(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, env.world.rank() == 0 ? 10 : 11);
  try {
    if (env.world.rank() == 0) env.world.send(data.tensor(), 1, *stream);
    if (env.world.rank() == 1) env.world.recv(data.tensor(), 0, *stream);
    if (env.world.rank() > 1) env.world.barrier();
    stream->synchronize();
  } catch (const Error& error) {
    const std::string text = error.what();
    REQUIRE_THAT(
        text.find("40 bytes") != std::string::npos && text.find("44 bytes") != std::string::npos,
        "the error '{}' does not name both sizes", text);
    return;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "no error where one was due");
}

// Rank 0 aborts while the others wait in a group below the world.
void end_abort(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  const auto group = env.world.split(0, 0, "sub");
  Data data(DType::kF32, 100000);
  if (env.world.rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    env.world.abort("the sky fell");
    env.world.abort("a later reason");
  }
  require_aborted(
      [&] {
        group->all_reduce(data.tensor(), ReduceOp::kSum, *stream);
        stream->synchronize();
      },
      "the sky fell");
  require_aborted([&] { env.world.barrier(); }, "the sky fell");
}

// Every rank receives what nobody sends, or sends what nobody receives (a send waits for its
// receive, whatever its size), until another thread of the last rank aborts.
void end_in_message(RankEnv& env, bool is_send) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, 1);
  const int size = env.world.size();
  const bool is_last = env.world.rank() + 1 == size;
  std::thread aborter;
  if (is_last) {
    aborter = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      env.world.abort("never mind");
    });
  }
  struct Join {
    std::thread& thread;
    ~Join() {
      if (thread.joinable()) thread.join();
    }
  } join{aborter};
  require_aborted(
      [&] {
        if (is_send) {
          env.world.send(data.tensor(), (env.world.rank() + 1) % size, *stream);
        } else {
          env.world.recv(data.tensor(), (env.world.rank() + 1) % size, *stream);
        }
        stream->synchronize();
      },
      "never mind");
}

void end_abort_recv(RankEnv& env) { end_in_message(env, false); }
void end_abort_send(RankEnv& env) { end_in_message(env, true); }

// A stream that failed before its collective must not leave the peers waiting.
void end_failed_stream(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, 5000);
  if (env.world.rank() == 0) {
    require_error(
        [&] {
          // On an inline stream the error comes at once and the collective is not even called.
          try {
            const auto fails = [] { throw Error(ErrorKind::kUser, "bad row"); };
            if (env.context.device().kind == DeviceKind::kCpu) {
              cpu::as_cpu(*stream).enqueue(fails);
            } else {
              fails();
            }
          } catch (const Error& error) {
            env.world.abort("stream had failed");
            throw;
          }
          env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
          stream->synchronize();
        },
        ErrorKind::kUser, {"bad row"});
    return;
  }
  require_aborted(
      [&] {
        env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
        stream->synchronize();
      },
      "stream had failed");
}

// Rank 0 does not come; the others say so. The group must have been made with kShortTimeout.
void end_timeout(RankEnv& env) {
  const auto stream = env.context.make_stream("comm");
  Data data(DType::kF32, 5000);
  env.world.barrier();
  if (env.world.rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    require_aborted([&] { env.world.barrier(); }, "rank 0");
    return;
  }
  try {
    env.world.all_reduce(data.tensor(), ReduceOp::kSum, *stream);
    stream->synchronize();
  } catch (const Error& error) {
    const std::string text = error.what();
    REQUIRE_THAT(
        text.find("all_reduce #2") != std::string::npos && text.find("rank 0") != std::string::npos,
        "the error '{}' does not name the operation and the missing rank", text);
    REQUIRE_THAT(error.kind() == ErrorKind::kTransient, "the error '{}' has another kind", text);
    return;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "no error where one was due");
}

}  // namespace

void set_operand_context(BackendContext* context) {
  const bool is_device = context != nullptr && context->device().kind != DeviceKind::kCpu;
  operand_context = is_device ? context : nullptr;
}

const std::vector<ConformanceCase>& lasting_cases() {
  static const std::vector<ConformanceCase> cases = {
      {"all_reduce", run_all_reduce},
      {"all_gather", run_all_gather},
      {"reduce_scatter", run_reduce_scatter},
      {"all_to_all", run_all_to_all},
      {"broadcast", run_broadcast},
      {"send_recv", run_send_recv},
      {"large", run_large},
      {"adjoints", run_adjoints},
      {"split", run_split},
      {"events", run_events},
      {"issue_order", run_issue_order},
      {"repeat", run_repeat},
      {"mesh", run_mesh},
      {"overlap", run_overlap},
  };
  return cases;
}

const std::vector<ConformanceCase>& ending_cases() {
  static const std::vector<ConformanceCase> cases = {
      {"other_operation", end_other_operation},
      {"other_dtype", end_other_dtype},
      {"other_count", end_other_count},
      {"other_message", end_other_message},
      {"abort", end_abort},
      {"abort_recv", end_abort_recv},
      {"abort_send", end_abort_send},
      {"failed_stream", end_failed_stream},
      {"timeout", end_timeout},
  };
  return cases;
}

const ConformanceCase& find_case(const std::string& name) {
  for (const auto* list : {&lasting_cases(), &ending_cases()}) {
    for (const ConformanceCase& one : *list) {
      if (one.name == name) return one;
    }
  }
  TESSERA_FAIL(ErrorKind::kInternal, "no conformance case is named {}", name);
}

}  // namespace tessera::test
