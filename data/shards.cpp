#include "data/shards.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "data/content_hash.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kSample = 64 << 10;
constexpr std::int64_t kGathered = 32 * kMiB;  // small files together
constexpr std::int64_t kSmall = 8 * kMiB;

// Lines, or the row groups of a Parquet file.
bool can_be_cut(const SourceFile& file) {
  return !file.is_compressed &&
         (file.format == FileFormat::kJsonLines || file.format == FileFormat::kLines ||
          file.format == FileFormat::kParquet);
}

bool is_gatherable(const SourceFile& file) {
  return file.bytes <= kSmall && file.format != FileFormat::kTokens &&
         file.format != FileFormat::kMegatron;
}

// Small enough that a killed preparation loses little, few enough that the cache stays tidy.
std::int64_t range_bytes(const SourceFile& file) {
  if (!can_be_cut(file)) return std::max<std::int64_t>(file.bytes, 1);
  return std::clamp((file.bytes / 256 + kMiB - 1) / kMiB * kMiB, 32 * kMiB, 1024 * kMiB);
}

}  // namespace

std::string file_identity(const SourceFile& file) {
  const int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK_USER(fd >= 0, "[data] {} cannot be opened: {}", file.path.string(), std::strerror(errno));
  struct stat info {};
  const bool known = ::fstat(fd, &info) == 0;
  ContentHash hash;
  hash.add(file.path.string()).add(static_cast<std::int64_t>(info.st_size));
  hash.add(static_cast<std::int64_t>(info.st_mtim.tv_sec))
      .add(static_cast<std::int64_t>(info.st_mtim.tv_nsec));
  std::string sample(kSample, '\0');
  for (const std::int64_t from :
       {std::int64_t{0}, std::max<std::int64_t>(0, info.st_size - kSample)}) {
    const ssize_t got = ::pread(fd, sample.data(), sample.size(), from);
    hash.add(std::string_view(sample.data(), got > 0 ? static_cast<std::size_t>(got) : 0));
  }
  ::close(fd);
  CHECK_USER(known, "[data] {} cannot be read", file.path.string());
  return hash.hex();
}

std::vector<KeyedShard> cut_into_shards(const std::vector<SourceFile>& files) {
  std::vector<KeyedShard> shards;
  KeyedShard gathered;
  ContentHash gathered_key;
  std::int64_t gathered_bytes = 0;
  const auto flush = [&] {
    if (gathered.ranges.empty()) return;
    gathered.key = gathered_key.hex();
    shards.push_back(std::move(gathered));
    gathered = {};
    gathered_key = {};
    gathered_bytes = 0;
  };
  for (const SourceFile& file : files) {
    const std::string identity = file_identity(file);
    if (is_gatherable(file)) {
      // Tens of thousands of small files must not become as many stores.
      gathered.ranges.push_back({file, 0, file.bytes});
      gathered_key.add(identity).add(name_of(file.format));
      gathered_bytes += file.bytes;
      // Besides the size, a file's own hash ends a shard: shards behind an added file meet the old
      // cuts.
      const bool is_cut = gathered_bytes >= kGathered / 16 && identity[0] == '0';
      if (gathered_bytes >= kGathered || is_cut) flush();
      continue;
    }
    flush();
    const std::int64_t step = range_bytes(file);
    for (std::int64_t begin = 0; begin == 0 || begin < file.bytes; begin += step) {
      const std::int64_t end = std::min(begin + step, file.bytes);
      ContentHash key;
      key.add(identity).add(name_of(file.format)).add(begin).add(end);
      shards.push_back({{{file, begin, end}}, key.hex(), begin > 0});
    }
  }
  flush();
  return shards;
}

}  // namespace tessera
