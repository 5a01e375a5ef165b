// CheckpointWriter: saves of a run, by all its ranks together.
//
// A save is complete or not there. Every rank writes its pieces to a file of its own in
// step-000500.partial-<tag>/; when all files are on the disk rank 0 adds the index, renames the folder
// to step-000500 and moves the marker `latest`; then it removes what the retention policy does not
// keep. A save that fails on any rank (full or read-only disk) fails on all of them with one message;
// earlier checkpoints and `latest` stay as they are and the partial folder is removed.
//
// Synchronous saves return when the checkpoint is committed. Asynchronous saves return when the copies
// into host memory are enqueued; background threads write and rank 0's commits as soon as the last rank
// is done, without the training threads. The next save, or finish(), waits for it and reports.
//
// Functions marked collective are called by every rank, in the same order, from the thread that owns
// `world`; all ranks return or throw alike.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/block_sources.h"
#include "checkpoint/named_state.h"
#include "checkpoint/save_job.h"
#include "parallel/communicator.h"

namespace tessera {

enum class OnSaveError {
  kStop,      // a failed save throws
  kContinue,  // it is reported by SaveOutcome and the run goes on; bugs (kInternal) still throw
};

struct CheckpointWriterOptions {
  int keep_last = 2;            // newest checkpoints kept; 0 keeps all
  std::int64_t keep_every = 0;  // steps divisible by it are kept as well; 0: none
  bool is_async = false;
  OnSaveError on_error = OnSaveError::kStop;
  int threads = 4;                                     // that write, per rank
  std::uint64_t block_bytes = std::uint64_t{4} << 20;  // of one write; each has its checksum
  double timeout_seconds = 600;     // rank 0's wait for files that other nodes have written
  double exit_grace_seconds = 5;    // the destructor's wait for a save in flight
  double bytes_per_second = 0;      // slows the writing down; 0: as fast as it goes
};

struct SaveOutcome {
  std::int64_t step = 0;
  bool is_saved = false;
  std::string error;    // why not, the same on every rank
  std::string warning;  // an old checkpoint could not be removed
  std::uint64_t bytes = 0;  // of all ranks
  double seconds = 0;       // from the call of save() to the commit, on rank 0
};

class CheckpointWriter {
 public:
  // Collective. Creates the folder, checks that every rank sees the same one (kUser) and that it can
  // be written to, and removes what an interrupted save left there. `world` and the context of
  // `stream` outlive the writer.
  CheckpointWriter(std::filesystem::path directory, Communicator& world, Stream& stream,
                   CheckpointWriterOptions options = {});
  // A save in flight gets exit_grace_seconds to end; call finish() to be sure of it.
  ~CheckpointWriter();

  // Collective. Saves what `states` hold after the work enqueued on `stream`; the memory they point to
  // need not outlive the call, except in an asynchronous save that of states which change only in the
  // update: see before_update(). `metadata_json` is kept as it is. First waits for, and reports, a save
  // in flight. Returns whether nothing has failed: always true with OnSaveError::kStop, which throws.
  bool save(std::int64_t step, std::span<const NamedState> states, const std::string& metadata_json,
            Stream& stream, std::vector<CheckpointFile> files = {});

  // To be called before the optimizer's update is enqueued on `stream`: makes it wait for the copies of
  // an asynchronous save. Costs nothing when there are none.
  void before_update(Stream& stream);

  // Collective. Waits for a save in flight and reports it as save() does.
  bool finish(Stream& stream);

  // This rank's view of a save in flight; neither blocks nor communicates. has_failed() is true from
  // the moment this rank knows: call finish(), by agreement of all ranks, to report it early.
  bool is_saving() const { return job_ != nullptr && !job_->is_finished(); }
  bool has_failed() const { return job_ != nullptr && job_->has_failed(); }

  // Saves that ended since the last call, in order. Of an asynchronous save rank 0 learns by itself
  // when it is committed, the other ranks (and of a failure all ranks) at the next save() or finish().
  std::vector<SaveOutcome> take_outcomes();

  // Steps that retention never removes (the best evaluation, say).
  void set_kept_steps(std::set<std::int64_t> steps) { kept_steps_ = std::move(steps); }

  // Collective. Whether a save of `states` would fit on the disk now; kTransient if not. Asynchronous:
  // also reserves the host memory of its copies, so that the first save does not.
  void check_space(std::span<const NamedState> states, Stream& stream);

  const std::filesystem::path& directory() const { return directory_; }

 private:
  std::unique_ptr<SaveJob> prepare(std::int64_t step, std::span<const NamedState> states,
                                   const std::string& metadata_json, Stream& stream,
                                   std::vector<CheckpointFile> files);
  RankRecord describe(const FileImage& image) const;
  char* reserve_snapshot(std::uint64_t image_bytes, const std::vector<RankRecord>& ranks, Stream& stream);
  void start_async(char* memory, Stream& stream);
  SaveOutcome good_outcome(std::int64_t step, const RankRecord& committed) const;
  bool settle(Stream& stream);
  bool report_failure(std::int64_t step, const std::vector<RankRecord>& records);
  void check_shared(Stream& stream);

  std::filesystem::path directory_;
  Communicator* world_;
  CheckpointWriterOptions options_;
  RankExchange exchange_;
  std::string tag_;             // of this writer, the same on every rank
  std::uint64_t num_saves_ = 0;
  std::set<std::int64_t> kept_steps_;
  std::vector<SaveOutcome> outcomes_;
  std::uint64_t total_bytes_ = 0;  // of the save in flight, all ranks
  bool is_reported_ = false;       // whether the save in flight is among outcomes_ already

  SnapshotMemory snapshot_memory_;
  bool has_warned_ = false;  // of too little host memory
  std::unique_ptr<Stream> copy_stream_;
  char* snapshot_target_ = nullptr;  // for the save in flight; null: it is written at once
  Snapshot* snapshot_ = nullptr;     // owned by job_
  std::unique_ptr<SaveJob> job_;     // in flight; last, since it reads the memory above
};

}  // namespace tessera
