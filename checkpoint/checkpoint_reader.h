// CheckpointReader: a complete checkpoint, read by any number of ranks under any layout.
//
// Every byte that is used has been compared with its checksum, also where only a part of a tensor is
// read. Anything that does not fit is kUser and names the file, tensor and region; a failing disk is
// kTransient.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/named_state.h"
#include "checkpoint/posix_file.h"
#include "engine/device/stream.h"

namespace tessera {

struct CheckpointReaderOptions {
  int threads = 4;  // that read, per call of read()
};

// Reads take no lock and may run on many threads: one object serves all ranks of a process.
class CheckpointReader {
 public:
  // Opens a step-* folder: checks the commit record, the sizes of all files, the index and that every
  // tensor is covered exactly once. Reads no tensor.
  explicit CheckpointReader(std::filesystem::path checkpoint, CheckpointReaderOptions options = {});

  const std::filesystem::path& path() const { return path_; }
  std::int64_t step() const { return record_.step; }
  int ranks() const { return record_.ranks; }  // that wrote it
  std::uint64_t total_bytes() const { return record_.total_bytes(); }
  const std::string& metadata() const { return metadata_; }  // as given to CheckpointWriter::save

  // What it holds, by name.
  const std::map<std::string, CheckpointTensor, std::less<>>& tensors() const {
    return index_.tensors;
  }
  bool contains(std::string_view name) const { return index_.tensors.contains(name); }

  const CheckpointIndex& index() const { return index_; }
  const CommitRecord& record() const { return record_; }

  // Fills every piece of every state, whatever `writes` says, converting among fp64, fp32, bf16 and
  // fp16 where the piece has another dtype. The stream is synchronised first; on return the pieces are
  // filled. On an error they may be filled in part.
  void read(std::span<const NamedState> states, Stream& stream) const;
  void read(const NamedState& state, Stream& stream) const { read({&state, 1}, stream); }

  // The content of a further file given to save(), checked against its checksum.
  bool has_file(std::string_view name) const { return record_.files.contains(name); }
  std::string read_file(std::string_view name) const;

 private:
  std::filesystem::path path_;
  CheckpointReaderOptions options_;
  CommitRecord record_;
  CheckpointIndex index_;
  std::string metadata_;
  std::vector<FileHandle> files_;  // as index_.files
};

// One difference between a checkpoint and what its checksums say.
struct CheckpointDamage {
  std::string file;  // name in the checkpoint
  std::string text;  // "[checkpoint] ...", with the tensors concerned
};

// Reads every byte of a checkpoint. Empty: it is whole.
std::vector<CheckpointDamage> verify_checkpoint(const std::filesystem::path& checkpoint,
                                                CheckpointReaderOptions options = {});

}  // namespace tessera
