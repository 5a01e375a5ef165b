// How files are told apart in cache keys, and cut or gathered into shards: the unit of tokenising.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/readers/source_files.h"
#include "data/tokenize.h"

namespace tessera {

// A hash of path, size, time of change, and the first and last 64 KiB.
std::string file_identity(const SourceFile& file);

struct KeyedShard {
  Shard ranges;
  std::string key;  // of the files and ranges
  // The shard continues the file of the one before: its records count on.
  bool continues_file = false;
};

// Large files of lines are cut into ranges, small files are gathered. Where the cuts lie depends on
// the file alone, and on its neighbours only nearby: a new file in a folder leaves the other shards
// as they are. Token and Megatron files are shards of their own.
std::vector<KeyedShard> cut_into_shards(const std::vector<SourceFile>& files);

}  // namespace tessera
