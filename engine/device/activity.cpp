#include "engine/device/activity.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace tessera {
namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view begin) { return text.starts_with(begin); });
}

// The name of a function as the Itanium ABI spells it inside a mangled name, <length><name>: the
// last one that ends in "_kernel". Empty where there is none.
std::string_view mangled_function(std::string_view name) {
  std::string_view found;
  for (std::size_t at = 0; at < name.size();) {
    if (std::isdigit(static_cast<unsigned char>(name[at])) == 0) {
      ++at;
      continue;
    }
    std::size_t length = 0;
    std::size_t i = at;
    for (; i < name.size() && std::isdigit(static_cast<unsigned char>(name[i])) != 0; ++i) {
      length =
          std::min<std::size_t>(length * 10 + static_cast<std::size_t>(name[i] - '0'), 1 << 20);
    }
    const std::string_view word = name.substr(i, length);
    if (word.size() == length && word.ends_with("_kernel")) {
      found = word;
      at = i + length;
    } else if (word.size() == length && word.starts_with("_GLOBAL__N_")) {
      at = i + length;
    } else {
      at = i;
    }
  }
  return found;
}

// "rmsnorm_forward_kernel" of "void tessera::cuda::(anonymous
// namespace)::rmsnorm_forward_kernel<...>".
std::string_view demangled_function(std::string_view name) {
  const std::size_t end = name.find("_kernel");
  if (end == std::string_view::npos) return {};
  std::size_t begin = end;
  while (begin > 0 && (std::isalnum(static_cast<unsigned char>(name[begin - 1])) != 0 ||
                       name[begin - 1] == '_')) {
    --begin;
  }
  return name.substr(begin, end + 7 - begin);
}

// A kernel of our own, by its function and, where the name is mangled, its source file.
ActivityKind classify_own(std::string_view name) {
  const bool is_mangled = name.starts_with("_Z");
  const std::string_view function = is_mangled ? mangled_function(name) : demangled_function(name);
  std::string op(function.substr(0, function.size() - std::min<std::size_t>(function.size(), 7)));
  if (op.ends_with("_any")) op.resize(op.size() - 4);
  static const std::set<std::string_view> optimizer = {"adamw", "add_squares", "square_parts",
                                                       "step_control_finish"};
  if (optimizer.contains(op)) {
    return {Activity::kOptimizer, op == "adamw" ? "adamw" : "gradient norm"};
  }
  if (op == "reduce_parts") return {Activity::kCommunication, "reduce"};
  const bool is_in_attention =
      contains(name, "attention_plain_cu") || contains(name, "attention_mma");
  if (is_in_attention || op == "forward" || op == "document_offsets" ||
      op == "zero_rows_past_end") {
    return {Activity::kAttention, op == "forward" || op == "document_offsets" ||
                                          op == "zero_rows_past_end" || op == "decode"
                                      ? "attention forward"
                                      : "attention backward"};
  }
  if (starts_with_any(op, {"backward_query", "backward_key", "delta"})) {
    return {Activity::kAttention, "attention backward"};
  }
  if (op == "zero_rows") op = "embedding_backward";
  if (op == "scale_of_nothing") op = "amax";
  if (op == "cast") op = "quantize";
  if (op == "decode") op = "decode blocks";
  if (starts_with_any(op, {"sum_parts"})) op = "sum_parts";
  return {Activity::kMemoryBound, op.empty() ? std::string(name) : op};
}

ActivityKind classify_nccl(std::string_view name) {
  static constexpr std::pair<std::string_view, const char*> kOps[] = {
      {"AllGather", "all_gather"}, {"ReduceScatter", "reduce_scatter"}, {"AllReduce", "all_reduce"},
      {"Broadcast", "broadcast"},  {"AllToAll", "all_to_all"},          {"AlltoAll", "all_to_all"},
      {"SendRecv", "send/recv"},
  };
  for (const auto& [part, op] : kOps) {
    if (contains(name, part)) return {Activity::kCommunication, op};
  }
  return {Activity::kCommunication, "nccl"};
}

// A name without namespaces, arguments and template arguments, for kernels that are not known.
std::string short_name(std::string_view name) {
  if (name.starts_with("void ")) name.remove_prefix(5);
  name = name.substr(0, name.find('('));
  name = name.substr(0, name.find('<'));
  const std::size_t scope = name.rfind("::");
  return std::string(scope == std::string_view::npos ? name : name.substr(scope + 2));
}

}  // namespace

const char* name_of(Activity activity) {
  static constexpr const char* kNames[] = {"GEMM",      "attention",     "memory-bound",
                                           "optimizer", "communication", "host copies"};
  return kNames[static_cast<int>(activity)];
}

ActivityKind classify_kernel(std::string_view name) {
  if (name == "copy host") return {Activity::kCopy, "copy"};
  if (name == "copy peer") return {Activity::kCommunication, "peer copy"};
  if (name == "copy device" || name == "set") return {Activity::kMemoryBound, std::string(name)};
  if (contains(name, "nccl")) return classify_nccl(name);
  if (contains(name, "tessera")) return classify_own(name);
  // cuDNN's engines ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_...") and the passes around
  // them that its fusions name.
  if (contains(name, "sdpa") || contains(name, "flash") || contains(name, "fmha") ||
      contains(name, "attention") || contains(name, "compute_dot_do_o") ||
      contains(name, "convert_dq_to_16bits")) {
    const bool is_backward = contains(name, "bprop") || contains(name, "bwd") ||
                             contains(name, "backward") || contains(name, "dot_do_o") ||
                             contains(name, "convert_dq");
    return {Activity::kAttention, is_backward ? "attention backward" : "attention forward"};
  }
  // cuBLASLt on Hopper: "nvjet_<formats>_..."; older ones "sm80_xmma_gemm_...", "cutlass_80_...",
  // "ampere_bf16_...gemm...", with a reduction of split sums behind them.
  if (contains(name, "nvjet") || contains(name, "gemm") || contains(name, "cutlass") ||
      contains(name, "splitK") || contains(name, "gemv") || contains(name, "cublas")) {
    return {Activity::kGemm, contains(name, "splitK") ? "split sums" : "gemm"};
  }
  if (contains(name, "cudnn")) return {Activity::kAttention, "attention backward"};
  return {Activity::kMemoryBound, short_name(name)};
}

ActivityBreakdown break_down(const std::vector<ActivitySpan>& spans, std::uint64_t begin_ns,
                             std::uint64_t end_ns) {
  ActivityBreakdown result;
  if (end_ns <= begin_ns) return result;
  result.span_seconds = 1e-9 * static_cast<double>(end_ns - begin_ns);

  std::map<std::pair<Activity, std::string>, OpTime> ops;
  struct Edge {
    std::uint64_t at;
    bool is_begin;
    std::size_t span;
  };
  std::vector<Edge> edges;
  std::vector<OpTime*> op_of(spans.size(), nullptr);
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const std::uint64_t begin = std::max(begin_ns, spans[i].begin_ns);
    const std::uint64_t end = std::min(end_ns, spans[i].end_ns);
    if (begin >= end) continue;
    OpTime& op = ops[{spans[i].kind.activity, spans[i].kind.op}];
    op.kind = spans[i].kind;
    ++op.count;
    op.total_seconds += 1e-9 * static_cast<double>(end - begin);
    op_of[i] = &op;
    edges.push_back({begin, true, i});
    edges.push_back({end, false, i});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
    return std::tie(a.at, a.is_begin, a.span) < std::tie(b.at, b.is_begin, b.span);
  });

  // Spans under way, the one that claims the moment first.
  using Claim = std::tuple<Activity, std::uint64_t, std::size_t>;
  const auto claim_of = [&](std::size_t i) {
    return Claim{spans[i].kind.activity, spans[i].begin_ns, i};
  };
  std::set<Claim> active;
  std::uint64_t now = begin_ns;
  const auto advance = [&](std::uint64_t to) {
    const double seconds = 1e-9 * static_cast<double>(to - now);
    if (active.empty()) {
      result.idle_seconds += seconds;
    } else {
      op_of[std::get<2>(*active.begin())]->seconds += seconds;
    }
    now = to;
  };
  for (const Edge& edge : edges) {
    advance(edge.at);
    if (edge.is_begin) {
      active.insert(claim_of(edge.span));
    } else {
      active.erase(claim_of(edge.span));
    }
  }
  advance(end_ns);

  for (auto& [key, op] : ops) {
    result.seconds[static_cast<int>(key.first)] += op.seconds;
    result.total_seconds[static_cast<int>(key.first)] += op.total_seconds;
    result.ops.push_back(std::move(op));
  }
  std::stable_sort(result.ops.begin(), result.ops.end(), [](const OpTime& a, const OpTime& b) {
    return a.kind.activity != b.kind.activity ? a.kind.activity < b.kind.activity
                                              : a.seconds > b.seconds;
  });
  return result;
}

}  // namespace tessera
