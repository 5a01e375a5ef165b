#include "engine/core/config_tree.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {
namespace {

std::size_t count_nodes(const ConfigNode& node) {
  std::size_t total = 1;
  for (const ConfigNode& item : node.items) total += count_nodes(item);
  for (const auto& [key, value] : node.entries) total += count_nodes(value);
  return total;
}

std::size_t depth_of(const ConfigNode& node) {
  std::size_t deepest = 0;
  for (const ConfigNode& item : node.items) deepest = std::max(deepest, depth_of(item));
  for (const auto& [key, value] : node.entries) deepest = std::max(deepest, depth_of(value));
  return deepest + 1;
}

}  // namespace

const ConfigNode* ConfigNode::find(std::string_view key) const {
  if (kind != Kind::kMap) return nullptr;
  for (const auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

std::string ConfigTreeBuilder::place(std::int64_t line) const {
  return fmt::format("{}:{}", file_, line);
}

void ConfigTreeBuilder::fail(std::int64_t line, std::string_view message) const {
  TESSERA_FAIL(ErrorKind::kUser, "[config] {} {}", place(line), message);
}

bool ConfigTreeBuilder::waits_for_key() const {
  return !open_.empty() && open_.back().node.kind == ConfigNode::Kind::kMap && !open_.back().has_key;
}

void ConfigTreeBuilder::count(std::int64_t line, std::size_t nodes) {
  nodes_ += nodes;
  if (nodes_ > kMaxNodes) {
    fail(line, fmt::format("holds more than {} values, aliases counted each time; a configuration "
                           "is smaller than that", kMaxNodes));
  }
}

void ConfigTreeBuilder::scalar(std::int64_t line, std::string text, bool quoted) {
  count(line, 1);
  if (waits_for_key()) {
    Open& open = open_.back();
    open.key_is_merge = merge_keys_ && !quoted && text == "<<";
    open.key = std::move(text);
    open.key_line = line;
    open.has_key = true;
    last_ = nullptr;
    return;
  }
  ConfigNode node;
  node.kind = ConfigNode::Kind::kScalar;
  node.scalar = std::move(text);
  node.quoted = quoted;
  node.where = place(line);
  node.order = line;
  deliver(std::move(node));
}

void ConfigTreeBuilder::null(std::int64_t line) {
  count(line, 1);
  if (waits_for_key()) fail(line, "has an empty key; a key is plain text");
  ConfigNode node;
  node.where = place(line);
  node.order = line;
  deliver(std::move(node));
}

void ConfigTreeBuilder::begin(std::int64_t line, ConfigNode::Kind container) {
  count(line, 1);
  if (waits_for_key()) {
    fail(line, "has a list or a map where a key belongs, or a bracket that is never closed; a value "
               "that begins with { or [ and is text needs quotes");
  }
  if (open_.size() >= kMaxDepth) {
    fail(line, fmt::format("is nested deeper than {} levels", kMaxDepth));
  }
  Open open;
  open.node.kind = container;
  open.node.where = place(line);
  open.node.order = line;
  open_.push_back(std::move(open));
}

void ConfigTreeBuilder::end() {
  Open open = std::move(open_.back());
  open_.pop_back();
  merge(open);
  deliver(std::move(open.node));
}

void ConfigTreeBuilder::value(std::int64_t line, const ConfigNode& node) {
  if (waits_for_key()) {
    if (node.kind != ConfigNode::Kind::kScalar) fail(line, "has an alias of a list or map as a key");
    scalar(line, node.scalar, node.quoted);
    return;
  }
  count(line, count_nodes(node));
  if (open_.size() + depth_of(node) > kMaxDepth + 1) {
    fail(line, fmt::format("is nested deeper than {} levels", kMaxDepth));
  }
  deliver(node);
}

void ConfigTreeBuilder::deliver(ConfigNode node) {
  if (open_.empty()) {
    root_ = std::move(node);
    has_root_ = true;
    last_ = &root_;
    return;
  }
  Open& open = open_.back();
  if (open.node.kind == ConfigNode::Kind::kSequence) {
    open.node.items.push_back(std::move(node));
    last_ = &open.node.items.back();
    return;
  }
  open.has_key = false;
  // Messages name the line of the key: that is what a reader looks for.
  const std::int64_t line = open.key_line;
  if (open.key_is_merge) {
    const bool is_list = node.kind == ConfigNode::Kind::kSequence;
    const bool maps_only =
        std::all_of(node.items.begin(), node.items.end(),
                    [](const ConfigNode& item) { return item.kind == ConfigNode::Kind::kMap; });
    if (node.kind == ConfigNode::Kind::kMap) {
      open.merges.push_back(std::move(node));
    } else if (is_list && maps_only) {
      for (ConfigNode& item : node.items) open.merges.push_back(std::move(item));
    } else {
      fail(line, "merges (<<) something that is not a map; write <<: *name of an anchored map");
    }
    static const ConfigNode kMerged;
    last_ = &kMerged;
    return;
  }
  node.where = place(line);
  node.order = line;
  open.node.entries.emplace_back(std::move(open.key), std::move(node));
  last_ = &open.node.entries.back().second;
}

void ConfigTreeBuilder::merge(Open& open) {
  // Keys written in the map win over merged ones, and earlier merged maps over later ones.
  for (const ConfigNode& source : open.merges) {
    for (const auto& entry : source.entries) {
      if (open.node.find(entry.first) == nullptr) open.node.entries.push_back(entry);
    }
  }
}

}  // namespace tessera
