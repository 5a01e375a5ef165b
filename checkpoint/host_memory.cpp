#include "checkpoint/host_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

std::optional<std::int64_t> read_number(const fs::path& path) {
  std::ifstream in(path);
  std::int64_t value = 0;
  if (in >> value) return value;
  return std::nullopt;  // missing, or "max"
}

// The number behind `key` in lines of "key number".
std::optional<std::int64_t> read_entry(const fs::path& path, const std::string& key) {
  std::ifstream in(path);
  std::string name;
  std::int64_t value = 0;
  while (in >> name >> value) {
    if (name == key) return value;
    in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// Memory that the machine can give without swapping (proc(5): MemAvailable, in KiB).
std::int64_t machine_bytes() {
  const auto kilobytes = read_entry("/proc/meminfo", "MemAvailable:");
  return kilobytes ? *kilobytes * 1024 : kUnlimited;
}

// What a control group still allows; its clean page cache gives way.
std::int64_t group_bytes(const fs::path& group) {
  const auto limit = read_number(group / "memory.max");
  const auto used = read_number(group / "memory.current");
  if (!limit || !used) return kUnlimited;
  const std::int64_t cache = read_entry(group / "memory.stat", "inactive_file").value_or(0);
  return std::max<std::int64_t>(0, *limit - *used + cache);
}

}  // namespace

std::int64_t available_host_bytes() {
  std::int64_t result = machine_bytes();
  // Version 2 of control groups: one line "0::/path"; every ancestor's limit holds as well. Inside a
  // container the own group is the mount's root.
  std::string line;
  std::ifstream in("/proc/self/cgroup");
  while (std::getline(in, line)) {
    if (!line.starts_with("0::/")) continue;
    const fs::path root = "/sys/fs/cgroup";
    fs::path path = line.substr(4);
    for (;; path = path.parent_path()) {
      result = std::min(result, group_bytes(root / path));
      if (path.empty()) break;
    }
  }
  return result;
}

}  // namespace tessera
