// Ranks and state for checkpoint tests: threads with a communicator and a stream each, and global
// tensors whose every element has a value of its own, cut into random rectangles.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "engine/core/numeric.h"
#include "engine/device/context.h"
#include "parallel/communicator.h"

namespace tessera::test {

struct Rank {
  Communicator& world;
  Stream& stream;
  int rank() const { return world.rank(); }
};

// Runs body on `size` threads; rethrows the lowest rank's exception, one that is a cause if there
// is any. A rank that throws aborts the others, as the trainer does.
inline void run_ranks(int size, const std::function<void(Rank&)>& body, bool inline_streams = true) {
  auto worlds = make_thread_communicators(size, 120);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Communicator& world = *worlds[static_cast<std::size_t>(r)];
      try {
        ContextOptions options;
        options.inline_streams = inline_streams;
        const auto context = make_context(Device{}, options);
        const auto stream = context->make_stream("main");
        Rank rank{world, *stream};
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
        world.abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::exception_ptr consequence;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const AbortedError&) {
      consequence = error;
    }
  }
  if (consequence) std::rethrow_exception(consequence);
}

// The value of element i of a tensor: exact in every float format up to bf16's eight bits, so that
// conversions can be compared, and different from its neighbours'.
inline float element_value(std::int64_t i, std::int64_t salt) {
  return static_cast<float>((i * 37 + salt * 101) % 251 - 125);
}

inline void store_element(void* data, DType dtype, std::int64_t at, float value) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[at] = value; break;
    case DType::kF32: static_cast<float*>(data)[at] = value; break;
    case DType::kBF16: static_cast<bf16*>(data)[at] = bf16(value); break;
    case DType::kF16: static_cast<f16*>(data)[at] = f16(value); break;
    case DType::kI64: static_cast<std::int64_t*>(data)[at] = static_cast<std::int64_t>(value); break;
    case DType::kI32: static_cast<std::int32_t*>(data)[at] = static_cast<std::int32_t>(value); break;
    case DType::kF8E4M3: static_cast<f8e4m3*>(data)[at] = f8e4m3(value); break;
    case DType::kF8E5M2: static_cast<f8e5m2*>(data)[at] = f8e5m2(value); break;
    case DType::kU8:
      static_cast<std::uint8_t*>(data)[at] = static_cast<std::uint8_t>(static_cast<int>(value) + 125);
      break;
  }
}

// States with the memory of their pieces.
class HostStates {
 public:
  NamedState& add(const std::string& name, DType dtype, Shape shape) {
    NamedState& state = states_.emplace_back();
    state.name = name;
    state.dtype = dtype;
    state.shape = shape;
    return state;
  }
  // Adds the rectangle to the state, zeroed; of the state's dtype unless another is given.
  void add_piece(NamedState& state, std::int64_t row_begin, std::int64_t rows, std::int64_t col_begin,
                 std::int64_t cols, std::optional<DType> dtype = {}) {
    const DType piece_dtype = dtype.value_or(state.dtype);
    memory_.push_back(std::make_unique<std::vector<std::byte>>(
        static_cast<std::size_t>(rows * cols) * size_of(piece_dtype)));
    Tensor data(memory_.back()->data(), piece_dtype, {rows * cols}, Device{});
    state.pieces.push_back({row_begin, rows, col_begin, cols, data});
  }
  void fill(std::int64_t salt) {
    for_each([&](void* data, DType dtype, std::int64_t at, std::int64_t global, const NamedState&) {
      store_element(data, dtype, at, element_value(global, salt));
    });
  }
  // The first element that is not as fill(salt) leaves it; empty if all are.
  std::string difference(std::int64_t salt) const {
    std::string result;
    for_each([&](const void* data, DType dtype, std::int64_t at, std::int64_t global,
                 const NamedState& state) {
      std::byte wanted[8] = {};
      store_element(wanted, dtype, 0, element_value(global, salt));
      const std::size_t size = size_of(dtype);
      const auto* got = static_cast<const std::byte*>(data) + static_cast<std::size_t>(at) * size;
      if (result.empty() && std::memcmp(got, wanted, size) != 0) {
        result = state.name + " element " + std::to_string(global);
      }
    });
    return result;
  }

  std::vector<NamedState>& states() { return states_; }

 private:
  template <typename Body>
  void for_each(const Body& body) const {
    for (const NamedState& state : states_) {
      const std::int64_t cols = state.shape.rank == 2 ? state.shape[1] : 1;
      for (const StatePiece& piece : state.pieces) {
        for (std::int64_t r = 0; r < piece.rows; ++r) {
          for (std::int64_t c = 0; c < piece.cols; ++c) {
            body(piece.data.data, piece.data.dtype, r * piece.cols + c,
                 (piece.row_begin + r) * cols + piece.col_begin + c, state);
          }
        }
      }
    }
  }

  std::vector<NamedState> states_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
};

// A random cut of rows x cols into rectangles that cover it once, as (row, rows, col, cols, owner).
struct Cut {
  std::int64_t row_begin, rows, col_begin, cols;
  int owner;
};
inline std::vector<Cut> random_cuts(std::int64_t rows, std::int64_t cols, int owners,
                                    std::mt19937& random) {
  std::vector<Cut> result;
  const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t, int)> cut =
      [&](std::int64_t r, std::int64_t n, std::int64_t c, std::int64_t m, int depth) {
        const int choice = static_cast<int>(random() % 3);
        if (depth > 0 && choice == 0 && n > 1) {
          const auto at = static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(n - 1));
          cut(r, at, c, m, depth - 1);
          cut(r + at, n - at, c, m, depth - 1);
        } else if (depth > 0 && choice == 1 && m > 1) {
          const auto at = static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(m - 1));
          cut(r, n, c, at, depth - 1);
          cut(r, n, c + at, m - at, depth - 1);
        } else if (n > 0 && m > 0) {
          result.push_back({r, n, c, m, static_cast<int>(random() % static_cast<unsigned>(owners))});
        }
      };
  cut(0, rows, 0, cols, 5);
  return result;
}

// A simple fixed layout: every rank holds a band of rows of a matrix, and a part of a vector; rank 0
// holds a counter.
inline HostStates banded_states(int rank, int ranks, std::int64_t rows = 64, std::int64_t cols = 48) {
  HostStates result;
  const std::int64_t begin = rows * rank / ranks;
  const std::int64_t end = rows * (rank + 1) / ranks;
  result.states().reserve(3);
  result.add_piece(result.add("weight/matrix", DType::kF32, {rows, cols}), begin, end - begin, 0, cols);
  result.add_piece(result.add("adam_m/vector", DType::kBF16, {rows}), begin, end - begin, 0, 1);
  NamedState& counter = result.add("counter", DType::kI64, {1});
  result.add_piece(counter, 0, 1, 0, 1);
  counter.writes = rank == 0;
  return result;
}

}  // namespace tessera::test
