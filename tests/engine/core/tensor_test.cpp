#include "engine/core/tensor.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace tessera {
namespace {

struct Matrix {
  std::vector<float> values;
  Tensor view;

  Matrix(std::int64_t rows, std::int64_t cols) : values(static_cast<std::size_t>(rows * cols)) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    view = Tensor(values.data(), DType::kF32, {rows, cols}, Device{});
  }
};

std::string internal_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInternal);
    return error.what();
  }
  return "";
}

TEST(Shape, CountsRowsColumnsAndElements) {
  const Shape shape{2, 3, 5};
  EXPECT_EQ(shape.numel(), 30);
  EXPECT_EQ(shape.rows(), 6);
  EXPECT_EQ(shape.cols(), 5);
  EXPECT_EQ(shape[-1], 5);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(to_string(shape), "[2, 3, 5]");
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_EQ(Shape{7}.rows(), 1);
  EXPECT_EQ((Shape{0, 4}.numel()), 0);
  EXPECT_TRUE((Shape{2, 3} == Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3} == Shape{2, 3, 1}));
  EXPECT_FALSE((Shape{2, 3} == Shape{3, 2}));
  // Sizes past 32 bits.
  EXPECT_EQ((Shape{1 << 20, 1 << 20}.numel()), std::int64_t{1} << 40);
  EXPECT_NE(internal_error([] { Shape{1, 1, 1, 1, 1}; }), "");
}

TEST(Tensor, RowSlicesPointIntoTheSameMemory) {
  Matrix m(4, 3);
  const Tensor rows = m.view.row_slice(1, 2);
  EXPECT_EQ(rows.as<float>()[0], 3.0f);
  EXPECT_EQ(rows.shape, (Shape{2, 3}));
  EXPECT_TRUE(rows.is_dense());
  EXPECT_EQ(m.view.row_slice(4, 0).numel(), 0);
  for (const auto& [begin, count] : {std::pair{-1, 1}, {0, 5}, {4, 1}, {2, -1}}) {
    EXPECT_NE(internal_error([&, b = begin, c = count] { m.view.row_slice(b, c); }), "");
  }
}

TEST(Tensor, ColumnSlicesKeepTheRowStride) {
  Matrix m(4, 6);
  const Tensor columns = m.view.col_slice(2, 3);
  EXPECT_EQ(columns.shape, (Shape{4, 3}));
  EXPECT_EQ(columns.row_stride, 6);
  EXPECT_FALSE(columns.is_dense());
  EXPECT_EQ(columns.as<float>()[0], 2.0f);
  EXPECT_EQ(columns.as<float>()[columns.row_stride], 8.0f);
  // A slice of a slice.
  const Tensor inner = columns.row_slice(1, 2).col_slice(1, 1);
  EXPECT_EQ(inner.as<float>()[0], 9.0f);
  EXPECT_EQ(inner.row_stride, 6);
  EXPECT_TRUE(columns.row_slice(2, 1).is_dense());
  EXPECT_NE(internal_error([&] { columns.flat_slice(0, 1); }), "");
  EXPECT_NE(internal_error([&] { columns.reshape({12}); }), "");
  EXPECT_NE(internal_error([&] { m.view.col_slice(4, 3); }), "");
}

TEST(Tensor, FlatSlicesAndReshape) {
  Matrix m(4, 3);
  const Tensor flat = m.view.flat_slice(5, 4);
  EXPECT_EQ(flat.shape, Shape{4});
  EXPECT_EQ(flat.as<float>()[0], 5.0f);
  const Tensor cube = m.view.reshape({2, 2, 3});
  EXPECT_EQ(cube.rows(), 4);
  EXPECT_EQ(cube.row_stride, 3);
  EXPECT_NE(internal_error([&] { m.view.reshape({5}); }), "");
}

TEST(Tensor, SlicesOfTensorsOfThreeDimsSeeThemAsRows) {
  Matrix m(6, 4);
  const Tensor cube = m.view.reshape({2, 3, 4});
  const Tensor rows = cube.row_slice(4, 2);
  EXPECT_EQ(rows.shape, (Shape{2, 4}));
  EXPECT_EQ(rows.as<float>()[0], 16.0f);
}

TEST(Tensor, MetaTensorsStayNull) {
  const Tensor meta(nullptr, DType::kBF16, {1 << 20, 1 << 14}, Device{DeviceKind::kMeta, 0});
  EXPECT_EQ(meta.bytes(), std::size_t{1} << 35);
  EXPECT_EQ(meta.row_slice(1 << 19, 4).data, nullptr);
  EXPECT_EQ(meta.col_slice(8, 8).data, nullptr);
  EXPECT_EQ(meta.as<bf16>(), nullptr);
}

TEST(Tensor, TypedAccessChecksTheType) {
  Matrix m(1, 1);
  EXPECT_EQ(internal_error([&] { m.view.as<bf16>(); }), "[tensor] read as bf16 but holds fp32");
}

TEST(Tensor, NamesItselfInMessages) {
  const Tensor tensor(nullptr, DType::kBF16, {8192, 4096}, Device{DeviceKind::kCuda, 1});
  EXPECT_EQ(to_string(tensor), "bf16 [8192, 4096] on cuda:1");
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceKind::kMeta, 0}), "meta");
  EXPECT_FALSE(Tensor{}.defined());
}

}  // namespace
}  // namespace tessera
