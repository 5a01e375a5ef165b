#include "tools/bench/collective_bench.h"

#include <algorithm>
#include <functional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "engine/device/buffer.h"
#include "engine/device/stream.h"

namespace tessera {
namespace {

constexpr int kWarmUp = 3;
constexpr int kRuns = 15;

std::string size_text(std::int64_t bytes) {
  return bytes >= (std::int64_t{1} << 20) ? fmt::format("{:.4g} MiB", static_cast<double>(bytes) / (1 << 20))
                                          : fmt::format("{:.4g} KiB", static_cast<double>(bytes) / (1 << 10));
}

class CollectiveTimer {
 public:
  CollectiveTimer(Communicator& world, BackendContext& context)
      : world_(&world),
        stream_(context.make_stream("collectives")),
        begin_(context.make_event()),
        end_(context.make_event()) {}

  double seconds(const std::function<void(Stream&)>& run) {
    std::vector<double> times;
    for (int i = -kWarmUp; i < kRuns; ++i) {
      world_->barrier();  // no rank's time holds another's lateness
      stream_->record(*begin_);
      run(*stream_);
      stream_->record(*end_);
      end_->synchronize();
      if (i >= 0) times.push_back(end_->milliseconds_since(*begin_) / 1e3);
    }
    stream_->synchronize();
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  Communicator* world_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> begin_, end_;
};

}  // namespace

std::vector<CollectiveResult> run_collective_bench(const CollectiveBenchOptions& options, Communicator& world,
                                                   BackendContext& context) {
  const int n = world.size();
  const auto element = static_cast<std::int64_t>(size_of(options.dtype));
  const auto rounded = [&](std::int64_t bytes) {
    return std::max<std::int64_t>(1, bytes / (element * n)) * element * n;
  };
  const auto largest = static_cast<std::size_t>(rounded(options.largest));
  const Buffer first(context, largest), second(context, largest);
  CollectiveTimer timer(world, context);
  {
    const auto stream = context.make_stream("clear");
    stream->set_zero(first.data(), largest);
    stream->set_zero(second.data(), largest);
    stream->synchronize();
  }
  std::vector<CollectiveResult> results;
  for (std::int64_t size = options.smallest; size <= options.largest; size *= 4) {
    const std::int64_t bytes = rounded(size);
    const Tensor whole(first.data(), options.dtype, Shape{bytes / element}, first.device());
    const Tensor other(second.data(), options.dtype, whole.shape, second.device());
    const Tensor piece = other.flat_slice(0, whole.numel() / n);
    const auto add = [&](const char* op, double factor, const std::function<void(Stream&)>& run) {
      const double seconds = timer.seconds(run);
      results.push_back({op, bytes, seconds, factor * static_cast<double>(bytes) / seconds});
    };
    const double share = static_cast<double>(n - 1) / n;
    add("all_reduce", 2 * share, [&](Stream& s) { world.all_reduce(whole, ReduceOp::kSum, s); });
    add("all_gather", share, [&](Stream& s) { world.all_gather(piece, whole, s); });
    add("reduce_scatter", share, [&](Stream& s) { world.reduce_scatter(whole, piece, ReduceOp::kSum, s); });
    add("all_to_all", share, [&](Stream& s) { world.all_to_all(whole, other, s); });
    // Pairs of neighbours; with an odd number of ranks the last one waits.
    const int peer = world.rank() % 2 == 0 ? world.rank() + 1 : world.rank() - 1;
    add("send_recv", 1, [&](Stream& s) {
      if (peer >= n) return;
      if (world.rank() % 2 == 0) {
        world.send(whole, peer, s);
      } else {
        world.recv(whole, peer, s);
      }
    });
  }
  return results;
}

std::string format_collectives(const std::vector<CollectiveResult>& results, int ranks, const std::string& device) {
  std::string text = fmt::format("{} ranks on {}; bus rate as nccl-tests counts it\n{:<16} {:>10} {:>12} {:>10}\n", ranks,
                                 device, "operation", "message", "us", "bus GB/s");
  for (const CollectiveResult& r : results) {
    text += fmt::format("{:<16} {:>10} {:>12.1f} {:>10.2f}\n", r.op, size_text(r.bytes), 1e6 * r.seconds,
                        r.bus_bytes_per_second / 1e9);
  }
  return text;
}

std::string collectives_json(const std::vector<CollectiveResult>& results, int ranks, const std::string& device) {
  nlohmann::ordered_json json;
  json["ranks"] = ranks;
  json["device"] = device;
  json["results"] = nlohmann::ordered_json::array();
  for (const CollectiveResult& r : results) {
    json["results"].push_back({{"op", r.op},
                               {"bytes", r.bytes},
                               {"seconds", r.seconds},
                               {"bus_bytes_per_second", r.bus_bytes_per_second}});
  }
  return json.dump();
}

}  // namespace tessera
