#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/core/config.h"
#include "engine/core/config_tree.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{16} << 20;

std::int64_t line_of(std::string_view text, std::size_t position) {
  return 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(position), '\n');
}

void check_size(std::uintmax_t bytes, const std::string& name) {
  CHECK_USER(bytes <= kMaxBytes, "[config] {} has {} bytes; a configuration is at most {}. Is it the "
             "right file?", name, bytes, kMaxBytes);
}

// A path such as data.train.0.path, cut at its dots.
std::vector<std::string> split_key(std::string_view key) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t dot = key.find('.');
    parts.emplace_back(key.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    key.remove_prefix(dot + 1);
  }
}

void mark_override(ConfigNode& node, std::int64_t rank) {
  node.where = "--set";
  node.order = std::numeric_limits<std::int64_t>::max() / 2 + rank;
  node.override_rank = rank;
  for (ConfigNode& item : node.items) mark_override(item, rank);
  for (auto& [key, value] : node.entries) mark_override(value, rank);
}

std::int64_t highest_rank(const ConfigNode& node) {
  std::int64_t rank = node.override_rank;
  for (const ConfigNode& item : node.items) rank = std::max(rank, highest_rank(item));
  for (const auto& [key, value] : node.entries) rank = std::max(rank, highest_rank(value));
  return rank;
}

}  // namespace

ConfigNode parse_config_text(std::string_view text, const std::string& name) {
  check_size(text.size(), name);
  CHECK_USER(!text.starts_with("\xFF\xFE") && !text.starts_with("\xFE\xFF"),
             "[config] {} is UTF-16; save it as UTF-8", name);
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    TESSERA_FAIL(ErrorKind::kUser, "[config] {}:{} holds a NUL byte; a configuration is text", name,
                 line_of(text, nul));
  }
  if (const std::size_t bad = find_invalid_utf8(text); bad != std::string_view::npos) {
    TESSERA_FAIL(ErrorKind::kUser, "[config] {}:{} holds the byte 0x{:02x}, which is not UTF-8; save "
                 "the file as UTF-8", name, line_of(text, bad), static_cast<unsigned char>(text[bad]));
  }
  return name.ends_with(".json") ? parse_json_text(text, name) : parse_yaml_text(text, name);
}

ConfigNode parse_config_file(const std::string& path) {
  std::error_code status;
  CHECK_USER(!std::filesystem::is_directory(path, status),
             "[config] {} is a folder; name a YAML or JSON file", path);
  std::ifstream stream(path, std::ios::binary);
  CHECK_USER(stream.good(), "[config] {} cannot be read: {}", path, std::strerror(errno));
  // One byte past the limit is enough to know; devices and pipes have no size to ask for.
  std::string text(kMaxBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  CHECK_USER(!stream.bad(), "[config] {} cannot be read: {}", path, std::strerror(errno));
  CHECK_USER(static_cast<std::size_t>(stream.gcount()) <= kMaxBytes,
             "[config] {} has more than {} bytes; is it the right file?", path, kMaxBytes);
  text.resize(static_cast<std::size_t>(stream.gcount()));
  return parse_config_text(text, path);
}

void apply_override(ConfigNode& root, std::string_view assignment) {
  const std::size_t equals = assignment.find('=');
  auto trimmed = [](std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
  };
  const std::string_view key = trimmed(assignment.substr(0, equals));
  const std::vector<std::string> parts = split_key(key);
  const bool well_formed = equals != std::string_view::npos &&
                           std::none_of(parts.begin(), parts.end(),
                                        [](const std::string& part) { return part.empty(); });
  CHECK_USER(well_formed, "[config] --set {} is not of the form section.key=value", assignment);

  ConfigNode value = parse_config_text(assignment.substr(equals + 1), fmt::format("--set {}", key));
  const std::int64_t rank = highest_rank(root) + 1;
  mark_override(value, rank);

  ConfigNode* node = &root;
  std::string path;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    ConfigNode* child = nullptr;
    if (node->kind == ConfigNode::Kind::kSequence) {
      const auto index = parse_integer(part);
      CHECK_USER(index && *index >= 0 && *index < static_cast<std::int64_t>(node->items.size()),
                 "[config] --set {}: {} is a list of {}; {} is not the number of one of its items "
                 "(the first is 0)", key, path, node->items.size(), part);
      child = &node->items[static_cast<std::size_t>(*index)];
    } else {
      CHECK_USER(node->kind != ConfigNode::Kind::kScalar,
                 "[config] --set {}: {} is the value {}, not a section", key,
                 path.empty() ? "the file" : path, node->scalar);
      if (node->kind == ConfigNode::Kind::kNull) {
        node->kind = ConfigNode::Kind::kMap;
        if (node->where.empty()) mark_override(*node, 0);
      }
      // The last of doubled keys, so that the reader still sees the file's own mistake.
      for (auto& [name, existing] : node->entries) {
        if (name == part) child = &existing;
      }
      if (child == nullptr) {
        ConfigNode missing;
        mark_override(missing, rank);
        child = &node->entries.emplace_back(part, std::move(missing)).second;
      }
    }
    path += path.empty() ? part : "." + part;
    node = child;
  }
  *node = std::move(value);
}

}  // namespace tessera
