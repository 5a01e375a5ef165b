// OpTimer: times ops on GPU 0, over arguments that do not come from the L2 cache, and prints time,
// achieved GB/s or TFLOP/s, and the share of the ceiling measured in the same run (a large device
// copy; the fastest product of the list).
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/stream.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"
#include "tools/bench/operands.h"
#include "tools/bench/soak.h"

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

  Tensor tensor(DType dtype, Shape shape, float std = 1.0f) {
    return operands_.tensor(dtype, shape, std);
  }
  template <typename T>
  Tensor upload(DType dtype, const std::vector<T>& values) {
    return operands_.upload(dtype, values);
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
  void clear() { operands_.clear(); }

  void print() {
    const double copy = copy_rate(*context_) / 1e9;
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
  Operands operands_{*stream_};
  std::vector<Row> rows_;
};

}  // namespace tessera
