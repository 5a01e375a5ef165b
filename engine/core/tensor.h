// Tensor: a non-owning, trivially copyable view of row-major memory. Rows (the last dim) are dense;
// successive rows of a rank >= 2 tensor may be further apart than their length (row_stride), and the
// outer dims are dense over rows. It never carries scales or ownership: see memory/arena.h for owners.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "engine/core/device.h"
#include "engine/core/dtype.h"
#include "engine/core/error.h"
#include "engine/core/numeric.h"

namespace tessera {

inline constexpr int kMaxRank = 4;

struct Shape {
  std::int64_t dims[kMaxRank] = {};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes) {
    CHECK(sizes.size() <= kMaxRank, "[shape] rank {} is above {}", sizes.size(), kMaxRank);
    for (const std::int64_t size : sizes) dims[rank++] = size;
  }

  std::int64_t operator[](int dim) const { return dims[dim < 0 ? rank + dim : dim]; }
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (int i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
  // Product of all dims but the last (1 for rank 0 and 1).
  std::int64_t rows() const {
    std::int64_t product = 1;
    for (int i = 0; i + 1 < rank; ++i) product *= dims[i];
    return product;
  }
  std::int64_t cols() const { return rank == 0 ? 1 : dims[rank - 1]; }

  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank != b.rank) return false;
    for (int i = 0; i < a.rank; ++i) {
      if (a.dims[i] != b.dims[i]) return false;
    }
    return true;
  }
};

std::string to_string(const Shape& shape);  // "[8192, 4096]"

struct Tensor {
  void* data = nullptr;
  Shape shape;
  std::int64_t row_stride = 0;  // elements between the starts of successive rows; cols() when dense
  DType dtype = DType::kF32;
  Device device;

  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape, Device device)
      : data(data), shape(shape), row_stride(shape.cols()), dtype(dtype), device(device) {}

  bool defined() const { return shape.rank > 0; }
  std::int64_t numel() const { return shape.numel(); }
  std::int64_t rows() const { return shape.rows(); }
  std::int64_t cols() const { return shape.cols(); }
  bool is_dense() const { return row_stride == cols() || rows() <= 1; }
  // Bytes of the elements; gaps between rows are not counted.
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }

  // Typed pointer; the type must match dtype. Null on the meta device.
  template <typename T>
  T* as() const {
    CHECK(DTypeOf<T>::value == dtype, "[tensor] read as {} but holds {}",
          name_of(DTypeOf<T>::value), name_of(dtype));
    return static_cast<T*>(data);
  }

  // Rows [begin, begin + count) of the tensor seen as [rows, cols].
  Tensor row_slice(std::int64_t begin, std::int64_t count) const;
  // Columns [begin, begin + count) of every row; keeps the row stride.
  Tensor col_slice(std::int64_t begin, std::int64_t count) const;
  // Elements [begin, begin + count) of a dense tensor as a rank-1 view.
  Tensor flat_slice(std::int64_t begin, std::int64_t count) const;
  // The same elements under another shape; the tensor must be dense.
  Tensor reshape(Shape shape) const;
};

static_assert(std::is_trivially_copyable_v<Tensor>);

std::string to_string(const Tensor& tensor);  // "bf16 [8192, 4096] on cuda:0"

}  // namespace tessera
