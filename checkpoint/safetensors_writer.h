// Writers of safetensors: one file, or a model folder in shards under an index. The list of tensors
// is given up front, so the header goes first and the data streams behind it, never held in memory.
//
// Nothing is visible under its final name before it is complete on the disk. A full, read-only or
// failing disk is kTransient with the path, at the earliest moment it can be known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/posix_file.h"
#include "checkpoint/safetensors.h"
#include "engine/core/dtype.h"

namespace tessera {

struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;

  std::uint64_t bytes() const;
};

struct SafetensorsOptions {
  // transformers refuses a file whose metadata does not name its framework.
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  // The data part begins at a multiple of this, by blanks behind the header: 8 as the reference
  // library does, 4096 for direct I/O. A power of two.
  std::uint64_t data_alignment = 8;
};

// One file. write() calls bring the bytes of the tensors in the order of the list.
class SafetensorsWriter {
 public:
  // Creates the temporary file beside `path`, reserves its space and writes the header. Names must
  // differ (kInternal otherwise).
  SafetensorsWriter(std::filesystem::path path, const std::vector<SafetensorsSpec>& tensors,
                    const SafetensorsOptions& options = {});
  ~SafetensorsWriter();  // removes the temporary file unless published
  SafetensorsWriter(SafetensorsWriter&&) = delete;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;

  // The next `bytes` of tensor `name`; any number of pieces, of any size. A tensor must be complete
  // before the next one begins.
  void write(std::string_view name, const void* data, std::size_t bytes);

  // All data is there: flush and fsync the temporary file. Called by commit().
  void finish();
  // Rename to the final name; the caller makes the folder last (sync_folder).
  void publish();
  // finish(), publish() and fsync of the folder.
  void commit();

  const std::filesystem::path& path() const { return path_; }

 private:
  void flush();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  FileHandle file_;
  std::vector<SafetensorsTensor> tensors_;
  std::size_t current_ = 0;    // tensor that the next bytes belong to
  std::uint64_t written_ = 0;  // bytes of the data part accepted so far
  std::vector<char> buffer_;   // small pieces gather here
  bool finished_ = false;
  bool published_ = false;
};

// A model folder: `<stem>.safetensors`, or shards of at most `max_shard_bytes` (a larger tensor has
// a shard of its own) and `<stem>.safetensors.index.json`.
//
// commit() replaces an earlier save of the same stem in that folder: its index goes first and the
// new one comes last, so a crash in between leaves a folder that does not load, never one that
// mixes two saves; then the shards that only the earlier save used are removed. Files with other
// names are not touched.
class SafetensorsFolderWriter {
 public:
  static constexpr std::uint64_t kDefaultShardBytes = 5'000'000'000;

  SafetensorsFolderWriter(std::filesystem::path folder, std::vector<SafetensorsSpec> tensors,
                          std::uint64_t max_shard_bytes = kDefaultShardBytes,
                          std::string_view stem = "model", SafetensorsOptions options = {});
  ~SafetensorsFolderWriter();

  // As SafetensorsWriter::write, over the whole list.
  void write(std::string_view name, const void* data, std::size_t bytes);
  void commit();

  std::size_t num_shards() const { return shards_.size(); }

 private:
  struct Shard {
    std::string file_name;
    std::vector<SafetensorsSpec> tensors;
    std::unique_ptr<SafetensorsWriter> writer;  // from its first byte on
  };
  void open_shard(std::size_t index);
  void remove_temporaries_of_dead_saves() const;
  void remove_earlier_save() const;
  void write_index() const;

  std::filesystem::path folder_;
  std::string stem_;
  SafetensorsOptions options_;
  std::vector<Shard> shards_;
  std::map<std::string, std::size_t, std::less<>> shard_of_name_;
  std::size_t current_ = 0;
  bool committed_ = false;
};

}  // namespace tessera
