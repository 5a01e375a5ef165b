// The weights of a model folder as one set of named tensors, whether they lie in one file or in
// shards under an index.
//
// `<stem>.safetensors.index.json`, when present, is authoritative: only the shards it names are
// opened and only the tensors it places are seen, so older shards and stray files beside them are
// not read. Otherwise `<stem>.safetensors` is the set.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

class SafetensorsFolder {
 public:
  struct Entry {
    const SafetensorsFile* file = nullptr;
    const SafetensorsTensor* tensor = nullptr;
  };

  // `path` is a folder, one .safetensors file or one .index.json. Every shard's header is read and
  // checked; whatever the index names and the folder lacks is listed in one kUser error. One file
  // descriptor per shard stays open: share the object between the ranks of a process.
  explicit SafetensorsFolder(const std::filesystem::path& path, std::string_view stem = "model");

  const std::filesystem::path& path() const { return path_; }
  // By name, in order of the name.
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

  const Entry* find(std::string_view name) const;
  const Entry& get(std::string_view name) const;  // kUser if it is not there
  std::uint64_t total_bytes() const;

 private:
  void open_single(const std::filesystem::path& file);
  void open_sharded(const std::filesystem::path& index);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Entry, std::less<>> entries_;
};

// "model-00002-of-00005.safetensors"; "model.safetensors" when `count` is 1. `index` from 0.
std::string shard_name(std::string_view stem, std::size_t index, std::size_t count);
// "model.safetensors.index.json".
std::string shard_index_name(std::string_view stem);

}  // namespace tessera
