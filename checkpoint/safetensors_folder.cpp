#include "checkpoint/safetensors_folder.h"

#include <fmt/format.h>

#include <set>
#include <system_error>

#include "checkpoint/json_text.h"
#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "safetensors";
constexpr std::uint64_t kLargestIndex = 100'000'000;
constexpr std::size_t kMostListed = 8;

bool ends_with_index(const fs::path& path) {
  return path.filename().string().ends_with(".index.json");
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// What lies in a folder without the wanted files, as a hint.
std::string describe_contents(const fs::path& folder) {
  std::vector<std::string> weights;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (extension == ".safetensors" || extension == ".bin" || extension == ".pth" ||
        extension == ".gguf") {
      weights.push_back(name);
    }
    if (weights.size() == kMostListed) break;
  }
  if (weights.empty()) return "it holds no weights at all";
  return fmt::format("it holds {}; only safetensors under the standard names are read",
                     fmt::join(weights, ", "));
}

// The first few of a list, and how many more there are.
std::string shorten(const std::vector<std::string>& items) {
  if (items.size() <= kMostListed) return fmt::format("{}", fmt::join(items, ", "));
  return fmt::format("{} and {} more", fmt::join(items.begin(), items.begin() + kMostListed, ", "),
                     items.size() - kMostListed);
}

// An index may name files in its own folder only: it must not reach elsewhere on the disk.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

std::string shard_name(std::string_view stem, std::size_t index, std::size_t count) {
  if (count == 1) return fmt::format("{}.safetensors", stem);
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, index + 1, count);
}

std::string shard_index_name(std::string_view stem) {
  return fmt::format("{}.safetensors.index.json", stem);
}

SafetensorsFolder::SafetensorsFolder(const fs::path& path, std::string_view stem) : path_(path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  CHECK_USER(fs::exists(status), "[safetensors] {} does not exist", path.string());
  if (!fs::is_directory(status)) {
    if (ends_with_index(path)) {
      open_sharded(path);
    } else {
      open_single(path);
    }
    return;
  }
  const fs::path index = path / shard_index_name(stem);
  const fs::path single = path / shard_name(stem, 0, 1);
  if (is_there(index)) {
    open_sharded(index);
    if (is_there(single) && files_.front()->path() != single) {
      log::warning("[safetensors] {} is not read: {} beside it names the weights", single.string(),
                   index.filename().string());
    }
    return;
  }
  CHECK_USER(is_there(single), "[safetensors] {} has neither {} nor {}; {}", path.string(),
             single.filename().string(), index.filename().string(), describe_contents(path));
  open_single(single);
}

void SafetensorsFolder::open_single(const fs::path& file) {
  files_.push_back(std::make_unique<SafetensorsFile>(file));
  for (const SafetensorsTensor& tensor : files_.back()->tensors()) {
    entries_.emplace(tensor.name, Entry{files_.back().get(), &tensor});
  }
}

void SafetensorsFolder::open_sharded(const fs::path& index) {
  const std::string where = index.string();
  const nlohmann::ordered_json json =
      parse_json_text(read_text_file(index, kLargestIndex, kWho), where, kWho);
  CHECK_USER(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
             "[safetensors] {} has no weight_map object", where);
  std::map<std::string, std::vector<std::string>> names_of_shard;
  for (const auto& [name, shard] : json["weight_map"].items()) {
    CHECK_USER(shard.is_string() && is_plain_file_name(shard.get<std::string>()),
               "[safetensors] {}: weight_map places {} in {}, wanted the name of a file in the "
               "same folder",
               where, printable_name(name), printable_name(shard.dump()));
    names_of_shard[shard.get<std::string>()].push_back(name);
  }
  CHECK_USER(!names_of_shard.empty(), "[safetensors] {} names no tensor", where);

  const fs::path folder = index.parent_path();
  std::vector<std::string> missing_shards;
  for (const auto& [shard, names] : names_of_shard) {
    if (!is_there(folder / shard)) missing_shards.push_back(printable_name(shard));
  }
  CHECK_USER(missing_shards.empty(),
             "[safetensors] {} names {} of {} shards that are not in the folder: {}. Copy or "
             "download them again",
             where, missing_shards.size(), names_of_shard.size(), shorten(missing_shards));

  std::vector<std::string> missing_tensors;
  for (const auto& [shard, names] : names_of_shard) {
    files_.push_back(std::make_unique<SafetensorsFile>(folder / shard));
    const SafetensorsFile& file = *files_.back();
    for (const std::string& name : names) {
      const SafetensorsTensor* tensor = file.find(name);
      if (tensor == nullptr) {
        missing_tensors.push_back(fmt::format("{} (in {})", printable_name(name), shard));
      } else {
        entries_.emplace(name, Entry{&file, tensor});
      }
    }
  }
  CHECK_USER(
      missing_tensors.empty(),
      "[safetensors] {} places {} tensors in shards that do not hold them: {}. The index and "
      "the shards are of different saves",
      where, missing_tensors.size(), shorten(missing_tensors));
}

const SafetensorsFolder::Entry* SafetensorsFolder::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const SafetensorsFolder::Entry& SafetensorsFolder::get(std::string_view name) const {
  const Entry* entry = find(name);
  CHECK_USER(entry != nullptr, "[safetensors] {} has no tensor {}", path_.string(),
             printable_name(name));
  return *entry;
}

std::uint64_t SafetensorsFolder::total_bytes() const {
  std::uint64_t total = 0;
  for (const auto& [name, entry] : entries_) total += entry.tensor->bytes();
  return total;
}

}  // namespace tessera
