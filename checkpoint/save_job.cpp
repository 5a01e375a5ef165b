#include "checkpoint/save_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "checkpoint/block_sources.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/posix_file.h"
#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "checkpoint";
constexpr std::uint64_t kLargestIndex = std::uint64_t{4} << 30;

std::string data_file_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }
std::string rank_index_name(int rank) { return fmt::format("rank-{:05}.index.json", rank); }

// The text in a file of that name, on the disk; its entry in the commit record.
CommittedFile write_text(const fs::path& path, std::string_view text) {
  const FileHandle file = create_for_writing(path, kWho);
  write_all(file, text.data(), text.size(), path, kWho);
  sync_file(file, path, kWho);
  return {text.size(), crc32c(text.data(), text.size())};
}

}  // namespace

SaveJob::SaveJob(SavePlan plan) : plan_(std::move(plan)) {}

SaveJob::~SaveJob() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

fs::path SaveJob::data_file() const { return plan_.partial / data_file_name(plan_.rank); }

void SaveJob::write(Stream& stream) {
  try {
    StagingRing ring(plan_.image, plan_.blocks.block_bytes, plan_.blocks.threads + 2, stream);
    write_blocks(ring);
    set_written({});
  } catch (...) {
    set_written(RankRecord::of_current_exception());
  }
}

void SaveJob::write_blocks(BlockSource& source) {
  BlockWriter writer(data_file(), plan_.image.bytes(), source, plan_.blocks);
  {
    const std::lock_guard lock(mutex_);
    writer_ = &writer;
    if (cancelled_) source.cancel();
  }
  struct Forget {
    SaveJob* job;
    ~Forget() {
      const std::lock_guard lock(job->mutex_);
      job->writer_ = nullptr;
    }
  } forget{this};
  source.run();
  write_rank_index(writer.finish());
}

void SaveJob::write_rank_index(std::vector<std::uint32_t> checksums) {
  CheckpointIndex index;
  index.block_bytes = plan_.blocks.block_bytes;
  index.files.push_back({data_file_name(plan_.rank), plan_.image.bytes(), std::move(checksums)});
  index.tensors = plan_.image.tensors();
  // Complete or not there: rank 0 takes its presence for "this rank is done".
  replace_file(plan_.partial / rank_index_name(plan_.rank), format_index(index), kWho);
}

void SaveJob::run_in_background(std::unique_ptr<BlockSource> source) {
  source_ = std::move(source);
  background_done_ = false;
  thread_ = std::thread([this] {
    log::set_thread_rank(plan_.rank);
    if (source_) {
      try {
        write_blocks(*source_);
        set_written({});
      } catch (...) {
        set_written(RankRecord::of_current_exception());
      }
    }
    if (plan_.rank == 0 && wait_written().is_ok && wait_for_ranks()) commit();
    const std::lock_guard lock(mutex_);
    background_done_ = true;
    changed_.notify_all();
  });
}

bool SaveJob::wait_for_ranks() {
  std::set<int> missing;
  for (int rank = 0; rank < plan_.ranks; ++rank) missing.insert(rank);
  auto pause = std::chrono::milliseconds(5);
  for (;;) {
    std::erase_if(missing, [&](int rank) {
      std::error_code ignored;
      return fs::exists(plan_.partial / rank_index_name(rank), ignored);
    });
    std::unique_lock lock(mutex_);
    if (cancelled_) return false;
    if (missing.empty()) return true;
    changed_.wait_for(lock, pause, [&] { return cancelled_; });
    pause = std::min(2 * pause, std::chrono::milliseconds(500));
  }
}

void SaveJob::commit() {
  try {
    commit_files();
  } catch (...) {
    remove_partial();  // every rank has written: nobody else is in the folder
    set_committed(RankRecord::of_current_exception());
    return;
  }
  RankRecord record;
  const auto elapsed = std::chrono::steady_clock::now() - plan_.start;
  record.values[0] = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count());
  record.text = remove_old_checkpoints(plan_.directory, plan_.retention);
  set_committed(std::move(record));
}

void SaveJob::commit_files() {
  CommitRecord record;
  record.step = plan_.step;
  record.ranks = plan_.ranks;
  record.sequence = 1;
  for (const CheckpointInfo& info : list_checkpoints(plan_.directory)) {
    record.sequence = std::max(record.sequence, info.sequence + 1);
  }
  CheckpointIndex index;
  index.block_bytes = plan_.blocks.block_bytes;
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    const fs::path path = plan_.partial / rank_index_name(rank);
    index.merge(parse_index(read_text_file(path, kLargestIndex, kWho), path.string()));
  }
  const std::string problem = index.coverage_problem();
  CHECK(problem.empty(), "[checkpoint] step {}: {} by the ranks' pieces", plan_.step, problem);
  for (const CheckpointDataFile& file : index.files) record.files[file.name].bytes = file.bytes;

  const auto add = [&](const std::string& name, std::string_view text) {
    CHECK(record.files.emplace(name, write_text(plan_.partial / name, text)).second,
          "[checkpoint] two files of a checkpoint are called {}", name);
  };
  for (const CheckpointFile& file : plan_.files) add(file.name, file.bytes);
  add(std::string(kMetadataFile), plan_.metadata);
  add(std::string(kIndexFile), format_index(index));
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    remove_file(plan_.partial / rank_index_name(rank), kWho);
  }
  write_text(plan_.partial / kCommitFile, format_commit(record));
  sync_folder(plan_.partial, kWho);
  publish_checkpoint(plan_.directory, plan_.partial, plan_.step);
}

void SaveJob::set_written(RankRecord record) {
  const std::lock_guard lock(mutex_);
  written_ = std::move(record);
  changed_.notify_all();
}

void SaveJob::set_committed(RankRecord record) {
  const std::lock_guard lock(mutex_);
  committed_ = std::move(record);
  changed_.notify_all();
}

RankRecord SaveJob::wait_written() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return written_.has_value(); });
  return *written_;
}

RankRecord SaveJob::wait_committed(double timeout_seconds) {
  std::unique_lock lock(mutex_);
  const bool done = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                      [&] { return committed_.has_value(); });
  if (done) return *committed_;
  RankRecord record;
  record.is_ok = false;
  record.text = fmt::format(
      "[checkpoint] after {} s rank 0 does not see every rank's file in {}. Is checkpoint.dir on a "
      "disk that all nodes share?",
      timeout_seconds, plan_.partial.string());
  return record;
}

std::optional<RankRecord> SaveJob::committed() const {
  const std::lock_guard lock(mutex_);
  return committed_;
}

bool SaveJob::is_finished() const {
  const std::lock_guard lock(mutex_);
  return background_done_;
}

bool SaveJob::has_failed() const {
  const std::lock_guard lock(mutex_);
  return (written_ && !written_->is_ok) || (committed_ && !committed_->is_ok);
}

bool SaveJob::wait_finished(double timeout_seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                           [&] { return background_done_; });
}

void SaveJob::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (writer_ != nullptr) writer_->cancel();
  changed_.notify_all();
}

void SaveJob::remove_partial() noexcept {
  std::error_code ignored;
  fs::remove_all(plan_.partial, ignored);
}

}  // namespace tessera
