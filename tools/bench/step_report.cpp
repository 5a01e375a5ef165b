// What `tessera bench step` prints.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/bench/step_bench.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

double mib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Minimum bytes of the formula for the ops whose kernels have this name; 0: none known. One pass of
// the formula may be several kernels ("cross_entropy_stats", "cross_entropy_backward").
const StepPass* pass_of(const StepWork& work, const std::string& op) {
  const StepPass* found = nullptr;
  for (const StepPass& pass : work.passes) {
    if (op == pass.op) return &pass;
    if (pass.op == "cross_entropy" && op.starts_with("cross_entropy_")) found = &pass;
  }
  return found;
}

// Seconds a step of all ops that belong to a pass.
double pass_seconds(const StepModeResult& mode, const StepWork& work, const StepPass& pass) {
  double seconds = 0;
  for (const OpTime& op : mode.breakdown.ops) {
    if (op.kind.activity == Activity::kMemoryBound && pass_of(work, op.kind.op) == &pass) {
      seconds += op.seconds;
    }
  }
  return mode.traced_steps > 0 ? seconds / mode.traced_steps : 0;
}

std::string format_mode(const StepBenchResult& result, const StepModeResult& mode) {
  std::string text =
      fmt::format("\n{}: {:.0f} tokens/s", mode.reproducible ? "reproducible" : "not reproducible",
                  mode.tokens_per_second);
  if (result.ranks > 1) {
    text +=
        fmt::format(" ({:.0f} a rank)", mode.tokens_per_second / static_cast<double>(result.ranks));
  }
  text += fmt::format("; a step takes {:.2f} ms ({:.2f} to {:.2f})", 1e3 * mode.step_seconds,
                      1e3 * mode.fastest_seconds, 1e3 * mode.slowest_seconds);
  const double rate = result.model_flops / mode.step_seconds / static_cast<double>(result.ranks);
  text += fmt::format("; {} TFLOP/s a rank",
                      rate < 1e13 ? fmt::format("{:.3f}", rate / 1e12) : fmt::format("{:.0f}", rate / 1e12));
  if (result.peak_flops > 0) text += fmt::format(", MFU {:.1f}%", 100 * rate / result.peak_flops);
  text += "\n";
  if (mode.skipped_steps > 0) {
    text += fmt::format("  {} steps were not finite and made no update\n", mode.skipped_steps);
  }
  if (mode.condition) {
    text += fmt::format("  SM clock {:.0f} MHz, {:.0f} of {:.0f} W, {:.0f} C ({} samples)\n",
                        mode.condition->sm_mhz, mode.condition->watts, mode.condition->limit_watts,
                        mode.condition->temperature, mode.condition->samples);
  }
  text += fmt::format("  memory planned {:.0f} MiB, reported by the device {:.0f} MiB\n",
                      mib(mode.planned_bytes), mib(mode.used_bytes));
  const double bound = result.bound_seconds();
  if (bound > 0) {
    text += fmt::format("  {:.1f}% of the soaked bound\n", 100 * bound / mode.step_seconds);
  }
  if (result.sgemm_rate > 0) {
    text += fmt::format("  {:.1f} GFLOP/s a rank, {:.1f}% of sgemm\n", rate / 1e9, 100 * rate / result.sgemm_rate);
  }
  if (mode.traced_steps == 0) {
    return text + fmt::format("  no breakdown: {}\n", mode.trace_problem);
  }

  const ActivityBreakdown& b = mode.breakdown;
  const double steps = mode.traced_steps;
  const double whole = b.span_seconds / steps;
  text += fmt::format("\n  {:<34} {:>9} {:>7} {:>8} {:>9} {:>9}\n",
                      fmt::format("a traced step, {:.2f} ms", 1e3 * whole), "ms", "share",
                      "launches", "least GB", "of copy");
  const auto line = [&](const std::string& name, double seconds) {
    return fmt::format("  {:<34} {:>9.3f} {:>6.1f}%", name, 1e3 * seconds, 100 * seconds / whole);
  };
  for (int i = 0; i < kActivities; ++i) {
    const auto activity = static_cast<Activity>(i);
    const double seconds = b.seconds[i] / steps;
    if (b.total_seconds[i] == 0) continue;
    std::string name = name_of(activity);
    if (activity == Activity::kCommunication || activity == Activity::kCopy) {
      name = fmt::format("exposed {} ({:.1f} ms run)", name, 1e3 * b.total_seconds[i] / steps);
    }
    text += line(name, seconds);
    const double bytes = activity == Activity::kMemoryBound ? result.per_rank.pass_bytes()
                         : activity == Activity::kOptimizer ? result.per_rank.optimizer_bytes
                                                            : 0;
    if (bytes > 0 && result.copy_rate > 0) {
      text += fmt::format(" {:>8} {:>9.2f} {:>8.1f}%", "", bytes / 1e9,
                          100 * bytes / seconds / result.copy_rate);
    }
    text += "\n";
    for (const OpTime& op : b.ops) {
      if (op.kind.activity != activity) continue;
      text += line("  " + op.kind.op, op.seconds / steps) +
              fmt::format(" {:>8.0f}", static_cast<double>(op.count) / steps);
      const StepPass* pass =
          activity == Activity::kMemoryBound ? pass_of(result.per_rank, op.kind.op) : nullptr;
      // The bytes of a pass of several kernels stand beside the first of them.
      const bool is_first_of_pass =
          pass != nullptr && std::find_if(b.ops.begin(), b.ops.end(), [&](const OpTime& other) {
                               return other.kind.activity == activity &&
                                      pass_of(result.per_rank, other.kind.op) == pass;
                             })->kind.op == op.kind.op;
      if (is_first_of_pass && result.copy_rate > 0) {
        text += fmt::format(
            " {:>9.2f} {:>8.1f}%", pass->bytes / 1e9,
            100 * pass->bytes / pass_seconds(mode, result.per_rank, *pass) / result.copy_rate);
      }
      text += "\n";
    }
  }
  text += line("idle", b.idle_seconds / steps) + "\n";
  return text;
}

std::string format_rate(const char* name, const SoakedRate& rate) {
  if (rate.soaked == 0) return "";
  const bool is_small = rate.soaked < 1e13;
  return fmt::format("  {:<22} {:>9.{}f} TFLOP/s (first burst {:.{}f})\n", name, rate.soaked / 1e12,
                     is_small ? 3 : 0, rate.burst / 1e12, is_small ? 3 : 0);
}

Json rate_json(const SoakedRate& rate) { return {{"soaked", rate.soaked}, {"burst", rate.burst}}; }

}  // namespace

std::string format_step_bench(const StepBenchResult& result) {
  std::string text = fmt::format("{}: {:.2f}B parameters, {}, on {}\n{}\n", result.work,
                                 static_cast<double>(result.parameters) / 1e9, result.compute,
                                 result.device, result.layout);
  if (result.per_rank.fp8_share() > 0) {
    text += fmt::format("{:.1f}% of the GEMM FLOPs in FP8\n", 100 * result.per_rank.fp8_share());
  }
  for (const StepModeResult& mode : result.modes) text += format_mode(result, mode);
  if (result.copy_rate == 0) return text;
  text += "\nrates of this device behind the steps, the model's own shapes\n";
  text += format_rate("products", result.products);
  text += format_rate("products, fp8", result.products_fp8);
  text += format_rate("attention forward", result.attention.forward);
  text += format_rate("attention backward", result.attention.backward);
  text += fmt::format("  {:<22} {:>9.0f} GB/s, read and written\n", "copy", result.copy_rate / 1e9);
  if (result.sgemm_rate > 0) {
    text += fmt::format("  {:<22} {:>9.1f} GFLOP/s\n", "sgemm", result.sgemm_rate / 1e9);
  }
  const double bound = result.bound_seconds();
  text += fmt::format(
      "soaked bound: {:.2f} ms a step, {:.0f} tokens/s (passes and optimizer at 85% of the copy "
      "rate, nothing hidden)\n",
      1e3 * bound, static_cast<double>(result.tokens) / bound);
  return text;
}

std::string step_bench_json(const StepBenchResult& result) {
  Json json;
  json["work"] = result.work;
  json["device"] = result.device;
  json["layout"] = result.layout;
  json["compute"] = result.compute;
  json["parameters"] = result.parameters;
  json["ranks"] = result.ranks;
  json["tokens_per_step"] = result.tokens;
  json["model_flops_per_step"] = result.model_flops;
  json["fp8_gemm_share"] = result.per_rank.fp8_share();
  json["modes"] = Json::array();
  for (const StepModeResult& mode : result.modes) {
    Json entry;
    entry["reproducible"] = mode.reproducible;
    entry["tokens_per_second"] = mode.tokens_per_second;
    entry["tokens_per_second_per_rank"] =
        mode.tokens_per_second / static_cast<double>(result.ranks);
    entry["step_seconds"] = mode.step_seconds;
    entry["fastest_seconds"] = mode.fastest_seconds;
    entry["slowest_seconds"] = mode.slowest_seconds;
    if (result.peak_flops > 0) {
      entry["mfu"] = result.model_flops / mode.step_seconds / static_cast<double>(result.ranks) /
                     result.peak_flops;
    }
    entry["skipped_steps"] = mode.skipped_steps;
    if (mode.condition) {
      entry["sm_mhz"] = mode.condition->sm_mhz;
      entry["watts"] = mode.condition->watts;
      entry["limit_watts"] = mode.condition->limit_watts;
      entry["celsius"] = mode.condition->temperature;
    }
    entry["planned_bytes"] = mode.planned_bytes;
    entry["used_bytes"] = mode.used_bytes;
    if (result.bound_seconds() > 0) {
      entry["share_of_bound"] = result.bound_seconds() / mode.step_seconds;
    }
    if (result.sgemm_rate > 0) {
      entry["share_of_sgemm"] =
          result.model_flops / mode.step_seconds / static_cast<double>(result.ranks) / result.sgemm_rate;
    }
    if (mode.traced_steps == 0) {
      entry["trace_problem"] = mode.trace_problem;
    } else {
      const double steps = mode.traced_steps;
      Json& breakdown = entry["breakdown"];
      breakdown["step_seconds"] = mode.breakdown.span_seconds / steps;
      for (int i = 0; i < kActivities; ++i) {
        breakdown[name_of(static_cast<Activity>(i))] = mode.breakdown.seconds[i] / steps;
      }
      breakdown["idle"] = mode.breakdown.idle_seconds / steps;
      breakdown["communication_run"] =
          mode.breakdown.total_seconds[static_cast<int>(Activity::kCommunication)] / steps;
      breakdown["ops"] = Json::array();
      for (const OpTime& op : mode.breakdown.ops) {
        breakdown["ops"].push_back({{"activity", name_of(op.kind.activity)},
                                    {"op", op.kind.op},
                                    {"seconds", op.seconds / steps},
                                    {"launches", static_cast<double>(op.count) / steps}});
      }
    }
    json["modes"].push_back(entry);
  }
  json["minimum_pass_bytes"] = result.per_rank.pass_bytes();
  json["minimum_optimizer_bytes"] = result.per_rank.optimizer_bytes;
  for (const StepPass& pass : result.per_rank.passes) json["passes"][pass.op] = pass.bytes;
  if (result.copy_rate > 0) {
    json["rates"] = {{"products", rate_json(result.products)},
                     {"products_fp8", rate_json(result.products_fp8)},
                     {"attention_forward", rate_json(result.attention.forward)},
                     {"attention_backward", rate_json(result.attention.backward)},
                     {"copy_bytes_per_second", result.copy_rate}};
    if (result.sgemm_rate > 0) json["rates"]["sgemm"] = result.sgemm_rate;
    json["bound_seconds"] = result.bound_seconds();
  }
  return json.dump();
}

}  // namespace tessera
