// OpFixture: a context, a stream and tensors for the test of one op, on any device. Tensors are given
// and read back as doubles, rounded to their dtype on the way in. Every op gets exactly the scratch that
// workspace() names, and the gaps between strided rows are checked to be untouched.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/philox.h"
#include "engine/core/tensor.h"
#include "engine/device/buffer.h"
#include "engine/device/context.h"
#include "engine/device/stream.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera::test {

using Values = std::vector<double>;

// Calls f with a value of the element type of `dtype`.
template <typename F>
void visit_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64: return f(double{});
    case DType::kF32: return f(float{});
    case DType::kBF16: return f(bf16{});
    case DType::kF16: return f(f16{});
    case DType::kF8E4M3: return f(f8e4m3{});
    case DType::kF8E5M2: return f(f8e5m2{});
    case DType::kI64: return f(std::int64_t{});
    case DType::kI32: return f(std::int32_t{});
    case DType::kU8: return f(std::uint8_t{});
  }
}

template <typename T>
double to_double(T value) {
  return static_cast<double>(value);
}
inline double to_double(bf16 value) { return static_cast<double>(static_cast<float>(value)); }
inline double to_double(f16 value) { return static_cast<double>(static_cast<float>(value)); }
inline double to_double(f8e4m3 value) { return static_cast<double>(static_cast<float>(value)); }
inline double to_double(f8e5m2 value) { return static_cast<double>(static_cast<float>(value)); }

template <typename T>
T from_double(double value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    return T(static_cast<float>(value));
  }
}

// `values` after rounding to `dtype`.
inline Values rounded(Values values, DType dtype) {
  visit_element(dtype, [&]<typename T>(T) {
    for (double& value : values) value = to_double(from_double<T>(value));
  });
  return values;
}

// Standard normal numbers times `scale`; the same for the same seed.
inline Values normal_values(std::int64_t count, std::uint64_t seed, double scale = 1.0) {
  Values values(static_cast<std::size_t>(count));
  const PhiloxKey key = derive_key(seed, RandomPurpose::kSynthetic);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = scale * philox_normal(key, i);
  return values;
}

class OpFixture {
 public:
  explicit OpFixture(Device device = {}, int cpu_threads = 1, bool inline_streams = true) {
    ContextOptions options;
    options.cpu_threads = cpu_threads;
    options.inline_streams = inline_streams;
    context_ = make_context(device, options);
    stream_ = context_->make_stream("test");
  }
  OpFixture(Device device, const ContextOptions& options)
      : context_(make_context(device, options)), stream_(context_->make_stream("test")) {}
  ~OpFixture() { check_gaps(); }

  BackendContext& context() { return *context_; }
  Stream& stream() { return *stream_; }
  bool is_cpu() const { return context_->device().kind == DeviceKind::kCpu; }

  // A tensor with these values; `gap` elements lie between rows.
  Tensor input(const Values& values, DType dtype, Shape shape, std::int64_t gap = 0) {
    CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(), "[test] {} values for {}",
          values.size(), to_string(shape));
    Tensor t = output(dtype, shape, gap);
    write(t, values);
    return t;
  }
  Tensor integers(const std::vector<std::int32_t>& values) {
    return input(Values(values.begin(), values.end()), DType::kI32,
                 Shape{static_cast<std::int64_t>(values.size())});
  }
  // A u8 tensor with the bytes of `object`, or of the elements of a vector.
  template <typename T>
  Tensor bytes_of(const std::vector<T>& objects) {
    const auto bytes = static_cast<std::int64_t>(objects.size() * sizeof(T));
    Tensor t = output(DType::kU8, Shape{bytes});
    if (bytes > 0) stream_->copy_bytes(t.data, objects.data(), static_cast<std::size_t>(bytes));
    stream_->synchronize();
    return t;
  }
  template <typename T>
  T object(const Tensor& t) {
    T result;
    stream_->copy_bytes(&result, t.data, sizeof(T));
    stream_->synchronize();
    return result;
  }

  // Memory filled with 0xff: NaN for every floating type, so that an unwritten element shows.
  Tensor output(DType dtype, Shape shape, std::int64_t gap = 0) {
    const std::int64_t stride = shape.cols() + gap;
    const auto bytes = static_cast<std::size_t>(shape.rows() * stride) * size_of(dtype);
    buffers_.emplace_back(*context_, std::max<std::size_t>(bytes, 1));
    Tensor t(buffers_.back().data(), dtype, shape, context_->device());
    if (gap > 0) t.row_stride = stride;
    const std::vector<unsigned char> poison(bytes, 0xff);
    if (bytes > 0) stream_->copy_bytes(t.data, poison.data(), bytes);
    stream_->synchronize();
    if (gap > 0) strided_.push_back(t);
    return t;
  }

  // The elements of `t`, rows without their gaps.
  Values values(const Tensor& t) {
    const std::vector<unsigned char> raw = raw_bytes(t);
    Values result;
    result.reserve(static_cast<std::size_t>(t.numel()));
    visit_element(t.dtype, [&]<typename T>(T) {
      for (std::int64_t i = 0; i < t.rows(); ++i) {
        for (std::int64_t j = 0; j < t.cols(); ++j) {
          T value;
          std::memcpy(&value, raw.data() + (i * t.row_stride + j) * sizeof(T), sizeof(T));
          result.push_back(to_double(value));
        }
      }
    });
    return result;
  }

  void write(const Tensor& t, const Values& values) {
    std::vector<unsigned char> raw = raw_bytes(t);
    visit_element(t.dtype, [&]<typename T>(T) {
      for (std::int64_t i = 0; i < t.rows(); ++i) {
        for (std::int64_t j = 0; j < t.cols(); ++j) {
          const T value = from_double<T>(values[static_cast<std::size_t>(i * t.cols() + j)]);
          std::memcpy(raw.data() + (i * t.row_stride + j) * sizeof(T), &value, sizeof(T));
        }
      }
    });
    if (!raw.empty()) stream_->copy_bytes(t.data, raw.data(), raw.size());
    stream_->synchronize();
  }

  // Runs the op with exactly its declared scratch and waits for it.
  template <typename Arguments>
  void run(void (*op)(const Arguments&, Stream&), const Arguments& args) {
    const std::size_t bytes = (workspace(args, context_->capabilities()) + 255) / 256 * 256;
    ScratchStack scratch(*stream_, bytes);
    op(args, *stream_);
    stream_->synchronize();
  }

  // Fails the test if an op wrote between the rows of a strided tensor.
  void check_gaps() {
    for (const Tensor& t : strided_) {
      const std::vector<unsigned char> raw = raw_bytes(t);
      const std::size_t element = size_of(t.dtype);
      for (std::int64_t i = 0; i + 1 < t.rows(); ++i) {
        const auto begin = static_cast<std::size_t>(i * t.row_stride + t.cols()) * element;
        const auto end = static_cast<std::size_t>((i + 1) * t.row_stride) * element;
        const bool intact = std::all_of(raw.begin() + static_cast<std::ptrdiff_t>(begin),
                                        raw.begin() + static_cast<std::ptrdiff_t>(end),
                                        [](unsigned char b) { return b == 0xff; });
        if (!intact) {
          ADD_FAILURE() << "the gap after row " << i << " of " << to_string(t) << " was written";
          return;
        }
      }
    }
  }

 private:
  std::vector<unsigned char> raw_bytes(const Tensor& t) {
    if (t.numel() == 0) return {};
    const std::int64_t elements = (t.rows() - 1) * t.row_stride + t.cols();
    std::vector<unsigned char> raw(static_cast<std::size_t>(elements) * size_of(t.dtype));
    stream_->synchronize();
    stream_->copy_bytes(raw.data(), t.data, raw.size());
    stream_->synchronize();
    return raw;
  }

  std::unique_ptr<BackendContext> context_;
  std::unique_ptr<Stream> stream_;
  std::deque<Buffer> buffers_;
  std::vector<Tensor> strided_;
};

// |got - want| <= bound element by element; a failure names the worst element.
inline void expect_close(const std::string& name, const Values& got, const Values& want,
                         const Values& bound) {
  ASSERT_EQ(got.size(), want.size()) << name;
  ASSERT_EQ(got.size(), bound.size()) << name;
  std::size_t worst = 0;
  double worst_ratio = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    double ratio = error == 0 ? 0 : error / bound[i];
    if (std::isnan(ratio)) ratio = INFINITY;
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      worst = i;
    }
  }
  EXPECT_LE(worst_ratio, 1.0) << name << "[" << worst << "] is " << got[worst] << ", expected "
                              << want[worst] << " within " << bound[worst];
}

inline void expect_bitwise(const std::string& name, const Values& a, const Values& b) {
  ASSERT_EQ(a.size(), b.size()) << name;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(std::memcmp(&a[i], &b[i], sizeof(double)) == 0)
        << name << "[" << i << "]: " << a[i] << " and " << b[i];
  }
}

}  // namespace tessera::test
