#include "data/export_tokens.h"

#include <algorithm>
#include <string>

#include "data/megatron.h"
#include "data/token_store.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// What is read at a time: documents may be larger than memory.
constexpr std::int64_t kBlock = 1 << 20;

template <typename OnPart>
void for_each_part(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                   OnPart&& on_part) {
  for (const auto& source : sources) {
    for (const StorePart& part : source->parts()) on_part(part);
  }
}

// Four bytes an id, unless every store knows that two are enough.
bool needs_wide_ids(const std::vector<std::shared_ptr<const DocumentSet>>& sources) {
  bool wide = false;
  for_each_part(sources, [&](const StorePart& part) {
    const std::int32_t max_id = part.store->counts().max_id;
    wide |= max_id < 0 ? part.store->num_documents() > 0 : max_id > 0xFFFF;
  });
  return wide;
}

void check_labels(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                  TokenFileKind kind) {
  LabelAlignment seen = LabelAlignment::kNone;
  for (const auto& source : sources) {
    const LabelAlignment alignment = source->alignment();
    if (alignment == LabelAlignment::kNone) continue;
    CHECK_USER(
        kind != TokenFileKind::kMegatron,
        "[data] the records have labels, which Megatron files cannot hold; write token files");
    CHECK_USER(
        seen == LabelAlignment::kNone || seen == alignment,
        "[data] the labels of some sources are aligned and those of others shifted; write them "
        "to files of their own");
    seen = alignment;
  }
}

ExportCounts write_megatron(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                            const std::filesystem::path& prefix, bool wide) {
  ExportCounts counts;
  MegatronWriter writer(prefix, wide);
  std::vector<std::int32_t> ids;
  for_each_part(sources, [&](const StorePart& part) {
    for (std::int64_t i = 0; i < part.store->num_documents(); ++i) {
      const DocumentEntry entry = part.store->document(i);
      ids.resize(entry.length);
      part.store->read(entry.begin, static_cast<std::int64_t>(entry.length), ids.data());
      writer.add_document(ids);
      ++counts.documents;
      counts.tokens += static_cast<std::int64_t>(entry.length);
    }
  });
  writer.commit();
  return counts;
}

ExportCounts write_tokens(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                          const std::filesystem::path& prefix, bool wide) {
  ExportCounts written;
  TokenStoreWriter writer(prefix, wide);
  StoreCounts counts;
  std::vector<StoreFile> files;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> trained;
  for_each_part(sources, [&](const StorePart& part) {
    const std::int64_t first_row = counts.rows_read;
    for (const StoreFile& file : part.store->files()) {
      // A range goes on where the one before ended.
      if (!files.empty() && files.back().path == file.path) continue;
      files.push_back({file.path, first_row + file.first_row});
    }
    for (std::int64_t i = 0; i < part.store->num_documents(); ++i) {
      const DocumentEntry entry = part.store->document(i);
      const auto length = static_cast<std::int64_t>(entry.length);
      for (std::int64_t done = 0; done < length; done += kBlock) {
        const std::int64_t count = std::min(kBlock, length - done);
        ids.resize(static_cast<std::size_t>(count));
        part.store->read(entry.begin + static_cast<std::uint64_t>(done), count, ids.data());
        writer.append(ids.data(), count);
      }
      if (entry.has_labels != 0) {
        trained.resize(entry.length);
        for (std::uint64_t t = 0; t < entry.length; ++t) {
          trained[t] = part.store->label_is_trained(entry.begin + t) ? 1 : 0;
        }
        writer.set_labels(trained.data(), length, entry.last_label);
      }
      writer.end_document(static_cast<std::uint64_t>(first_row) + entry.row);
      ++written.documents;
      written.tokens += length;
    }
    counts.add(part.store->counts());
  });
  // The places of label conflicts and of the highest id name files of the stores that were read.
  counts.labels.first_aligned_conflict = counts.labels.first_shifted_conflict = {};
  counts.max_id_place = {};
  writer.commit(std::move(counts), files);
  return written;
}

}  // namespace

ExportCounts export_tokens(const std::vector<std::shared_ptr<const DocumentSet>>& sources,
                           const std::filesystem::path& prefix, TokenFileKind kind) {
  check_labels(sources, kind);
  const bool wide = needs_wide_ids(sources);
  std::error_code code;
  if (prefix.has_parent_path()) std::filesystem::create_directories(prefix.parent_path(), code);
  CHECK_USER(!code, "[data] folder {} cannot be made: {}", prefix.parent_path().string(),
             code.message());
  return kind == TokenFileKind::kMegatron ? write_megatron(sources, prefix, wide)
                                          : write_tokens(sources, prefix, wide);
}

}  // namespace tessera
