// One save as one rank sees it: writing this rank's file, and on rank 0 the commit when every rank's
// file is there. Knows nothing of collectives: ranks meet through files in the save's folder, so the
// commit needs no help from the training threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/block_writer.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/file_image.h"
#include "checkpoint/rank_exchange.h"

namespace tessera {

// A further file of a checkpoint, written by rank 0: a configuration, an adapter.
struct CheckpointFile {
  std::string name;
  std::string bytes;
};

struct SavePlan {
  std::filesystem::path directory;
  std::filesystem::path partial;  // the folder being written, in `directory`
  std::int64_t step = 0;
  std::chrono::steady_clock::time_point start;  // of the call of save()
  int rank = 0;
  int ranks = 1;
  FileImage image;
  std::string metadata;
  std::vector<CheckpointFile> files;
  BlockWriterOptions blocks;
  RetentionPolicy retention;
};

class SaveJob {
 public:
  explicit SaveJob(SavePlan plan);
  ~SaveJob();  // cancels
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  const SavePlan& plan() const { return plan_; }

  // Writes this rank's file through a ring of staging blocks. The outcome is that of wait_written().
  void write(Stream& stream);
  // Writes it from `source` on a thread of its own, then, on rank 0, waits for the other ranks' files
  // and commits. Without a source the file has been written before.
  void run_in_background(std::unique_ptr<BlockSource> source);

  // This rank's file is on the disk, or why not.
  RankRecord wait_written();
  // Rank 0: commits now; every rank has written. The outcome is that of wait_committed().
  void commit();
  // Rank 0: the outcome of the commit; where it went well text is a warning, or empty, and values[0]
  // the microseconds since the start. An error if it takes longer than that.
  RankRecord wait_committed(double timeout_seconds);

  // Rank 0: the outcome if it is known. Does not block.
  std::optional<RankRecord> committed() const;
  // Neither blocks. Finished: nothing is left to do for this rank.
  bool is_finished() const;
  bool has_failed() const;
  bool wait_finished(double timeout_seconds);

  // Ends writing and waiting early; what has been committed stays.
  void cancel();
  // Rank 0, when no rank writes any more and the save has failed: removes the partial folder.
  void remove_partial() noexcept;

 private:
  std::filesystem::path data_file() const;
  void write_blocks(BlockSource& source);
  void write_rank_index(std::vector<std::uint32_t> checksums);
  bool wait_for_ranks();
  void commit_files();
  void set_written(RankRecord record);
  void set_committed(RankRecord record);

  SavePlan plan_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<RankRecord> written_;
  std::optional<RankRecord> committed_;
  bool cancelled_ = false;
  bool background_done_ = true;
  BlockWriter* writer_ = nullptr;  // while it writes
  std::unique_ptr<BlockSource> source_;
  std::thread thread_;
};

}  // namespace tessera
