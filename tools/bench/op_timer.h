// OpTimer: times ops on GPU 0, over arguments that do not come from the L2 cache, and prints time,
// achieved GB/s or TFLOP/s, and the share of the ceiling measured in the same run (a large device
// copy; the fastest product of the list).
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/buffer.h"
#include "engine/device/stream.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {

struct Row {
  std::string name;
  double milliseconds, bytes, flops;
};

class OpTimer {
 public:
  OpTimer(const ContextOptions& options, std::string filter)
      : filter_(std::move(filter)),
        context_(make_context(Device{DeviceKind::kCuda, 0}, options)),
        stream_(context_->make_stream("bench")),
        start_(context_->make_event()),
        end_(context_->make_event()) {}

  Stream& stream() { return *stream_; }

  // A tensor of normal numbers (of nothing, for integer types); lives until clear().
  Tensor tensor(DType dtype, Shape shape, float std = 1.0f) {
    const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
    buffers_.emplace_back(*context_, bytes);
    const Tensor t(buffers_.back().data(), dtype, shape, context_->device());
    if (is_fp8(dtype)) {
      // Magnitudes that use the format's range, as scaled tensors do.
      const Tensor wide = tensor(DType::kBF16, shape);
      scale(Scale{wide, t, 100.0}, *stream_);
    } else if (dtype == DType::kF32 || dtype == DType::kBF16) {
      FillNormal fill;
      fill.out = t.reshape(Shape{t.numel()});
      fill.key = derive_key(++seed_, RandomPurpose::kSynthetic);
      fill.global_cols = t.numel();
      fill.std = std;
      fill_normal(fill, *stream_);
    } else {
      stream_->set_zero(t.data, bytes);
    }
    return t;
  }
  template <typename T>
  Tensor upload(DType dtype, const std::vector<T>& values) {
    const std::int64_t count =
        static_cast<std::int64_t>(values.size() * sizeof(T) / size_of(dtype));
    const Tensor t = tensor(dtype, Shape{count});
    stream_->copy_bytes(t.data, values.data(), values.size() * sizeof(T));
    stream_->synchronize();
    return t;
  }

  // Times `make()()` over as many argument sets as keep `bytes` each out of the cache.
  template <typename Arguments>
  void time(const std::string& name, void (*op)(const Arguments&, Stream&),
            const std::function<Arguments()>& make, double bytes, double flops = 0) {
    if (!filter_.empty() && name.find(filter_) == std::string::npos) return;
    const std::size_t sets = std::clamp<std::size_t>(
        kColdBytes / static_cast<std::size_t>(std::max(bytes, 1.0)) + 1, 1, 64);
    std::vector<Arguments> args;
    std::size_t scratch_bytes = 256;
    for (std::size_t i = 0; i < sets; ++i) {
      args.push_back(make());
      scratch_bytes =
          std::max(scratch_bytes, workspace(args.back(), context_->capabilities()) + 4096);
    }
    std::vector<double> times;
    {
      ScratchStack scratch(*stream_, scratch_bytes);
      for (int i = 0; i < 3; ++i) op(args[static_cast<std::size_t>(i) % sets], *stream_);
      stream_->synchronize();
      for (int i = 0; i < kRuns; ++i) {
        stream_->record(*start_);
        op(args[static_cast<std::size_t>(i) % sets], *stream_);
        stream_->record(*end_);
        end_->synchronize();
        times.push_back(end_->milliseconds_since(*start_));
      }
    }
    std::sort(times.begin(), times.end());
    rows_.push_back({name, times[times.size() / 2], bytes, flops});
    fmt::print(stderr, "{} {:.4f} ms (scratch {} MiB)\n", name, rows_.back().milliseconds,
               scratch_bytes >> 20);
  }
  void clear() {
    stream_->synchronize();
    buffers_.clear();
  }

  double copy_rate() {
    const std::size_t bytes = std::size_t{2} << 30;
    const Buffer a(*context_, bytes), b(*context_, bytes);
    stream_->set_zero(a.data(), bytes);
    std::vector<double> times;
    for (int i = 0; i < 10; ++i) {
      stream_->record(*start_);
      stream_->copy_bytes(b.data(), a.data(), bytes);
      stream_->record(*end_);
      end_->synchronize();
      times.push_back(end_->milliseconds_since(*start_));
    }
    std::sort(times.begin(), times.end());
    return 2.0 * static_cast<double>(bytes) / times[5] / 1e6;
  }

  void print() {
    const double copy = copy_rate();
    double product = 0;
    for (const Row& row : rows_) product = std::max(product, row.flops / row.milliseconds / 1e9);
    fmt::print("\ncopy {:.0f} GB/s (read + written); fastest product {:.0f} TFLOP/s\n", copy,
               product);
    fmt::print("{:<36} {:>10} {:>10} {:>10} {:>7}\n", "op", "us", "GB/s", "TFLOP/s", "share");
    for (const Row& row : rows_) {
      const double bandwidth = row.bytes / row.milliseconds / 1e6;
      const double rate = row.flops / row.milliseconds / 1e9;
      const double share = row.flops > 0 ? rate / product : bandwidth / copy;
      fmt::print("{:<36} {:>10.1f} {:>10.0f} {:>10} {:>6.1f}%\n", row.name, row.milliseconds * 1e3,
                 bandwidth, row.flops > 0 ? fmt::format("{:.0f}", rate) : std::string("-"),
                 100 * share);
    }
  }

 private:
  static constexpr int kRuns = 25;
  static constexpr std::size_t kColdBytes = std::size_t{256} << 20;

  std::string filter_;
  std::unique_ptr<BackendContext> context_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> start_, end_;
  std::deque<Buffer> buffers_;
  std::vector<Row> rows_;
  std::uint64_t seed_ = 0;
};

}  // namespace tessera
