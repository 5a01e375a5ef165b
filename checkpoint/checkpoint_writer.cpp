#include "checkpoint/checkpoint_writer.h"

#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/host_memory.h"
#include "checkpoint/posix_file.h"
#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "checkpoint";

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "?";
  return name;
}

// Network file systems show a new file to other nodes after a while.
bool appears(const fs::path& path, double seconds) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

void require_space(const fs::path& directory, std::uint64_t bytes, const std::string& what) {
  struct statvfs status;
  if (::statvfs(directory.c_str(), &status) != 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] looking at the disk of {} failed: {}",
                 directory.string(), std::generic_category().message(errno));
  }
  const std::uint64_t free = std::uint64_t{status.f_bavail} * status.f_frsize;
  if (bytes <= free) return;
  TESSERA_FAIL(ErrorKind::kTransient,
               "[checkpoint] {} takes {} bytes, {} are free in {}. Free some space, lower "
               "checkpoint.keep_last or set checkpoint.dir to another disk",
               what, bytes, free, directory.string());
}

std::uint64_t sum_of_bytes(const std::vector<RankRecord>& records) {
  std::uint64_t total = 0;
  for (const RankRecord& record : records) total += record.values[0];
  return total;
}

// What a rank adds to its file: its index (about so much an extent, twice for a moment), rank 0 also
// the further files.
std::uint64_t bytes_beside(const SavePlan& plan) {
  std::uint64_t bytes = 4096;
  for (const auto& [name, tensor] : plan.image.tensors()) {
    bytes += 2 * (name.size() + 64 + 64 * tensor.extents.size());
  }
  if (plan.rank == 0) {
    bytes += plan.metadata.size();
    for (const CheckpointFile& file : plan.files) bytes += file.bytes.size();
  }
  return bytes;
}

[[noreturn]] void throw_record(const RankRecord& record, const std::string& text) {
  throw Error(record.kind, text);
}

}  // namespace

CheckpointWriter::CheckpointWriter(fs::path directory, Communicator& world, Stream& stream,
                                   CheckpointWriterOptions options)
    : directory_(std::move(directory)),
      world_(&world),
      options_(options),
      exchange_(world, stream) {
  CHECK_USER(options_.keep_last >= 0 && options_.keep_every >= 0 && options_.threads >= 1,
             "[checkpoint] keep_last {}, keep_every {} and {} threads: wanted no negative numbers "
             "and at least one thread",
             options_.keep_last, options_.keep_every, options_.threads);
  check_shared(stream);
}

void CheckpointWriter::check_shared(Stream& stream) {
  const auto probe_of = [&](std::uint64_t tag) {
    return directory_ / fmt::format(".probe-{:016x}", tag);
  };
  RankRecord own;
  if (world_->rank() == 0) {
    try {
      own.values[0] = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
      create_folders(directory_, kWho);
      remove_partial_saves(directory_);
      create_for_writing(probe_of(own.values[0]), kWho);
    } catch (...) {
      own = RankRecord::of_current_exception();
    }
  }
  const std::vector<RankRecord> begun = exchange_.gather(own, stream);
  if (!begun[0].is_ok) throw_record(begun[0], begun[0].text);
  const std::uint64_t tag = begun[0].values[0];
  tag_ = fmt::format("{:08x}", tag & 0xffffffffu);

  own = RankRecord();
  if (!appears(probe_of(tag), std::min(options_.timeout_seconds, 30.0))) {
    own.is_ok = false;
    own.kind = ErrorKind::kUser;
    own.text = fmt::format(
        "[checkpoint] rank {} on {} does not see what rank 0 wrote to {}. Set checkpoint.dir to a "
        "folder on a disk that all nodes share",
        world_->rank(), host_name(), directory_.string());
  }
  const std::vector<RankRecord> seen = exchange_.gather(own, stream);
  if (world_->rank() == 0) remove_file(probe_of(tag), kWho);
  const int failed = first_failed(seen);
  if (failed >= 0) {
    throw_record(seen[static_cast<std::size_t>(failed)], seen[static_cast<std::size_t>(failed)].text);
  }
}

CheckpointWriter::~CheckpointWriter() {
  // The files of a save in flight may still make a checkpoint, even when this run ends by an error.
  if (job_) job_->wait_finished(options_.exit_grace_seconds);
}

bool CheckpointWriter::report_failure(std::int64_t step, const std::vector<RankRecord>& records) {
  const int failed = first_failed(records);
  const RankRecord& record = records[static_cast<std::size_t>(failed)];
  SaveOutcome outcome;
  outcome.step = step;
  outcome.error = fmt::format("[checkpoint] step {} was not saved (rank {}): {}", step, failed,
                              record.text);
  outcomes_.push_back(outcome);
  if (options_.on_error == OnSaveError::kStop || record.kind == ErrorKind::kInternal) {
    throw_record(record, outcome.error);
  }
  if (world_->rank() == 0) {
    log::error("{}. Training goes on without it (checkpoint.on_error: continue)", outcome.error);
  }
  return false;
}

std::unique_ptr<SaveJob> CheckpointWriter::prepare(std::int64_t step,
                                                   std::span<const NamedState> states,
                                                   const std::string& metadata_json,
                                                   Stream& stream,
                                                   std::vector<CheckpointFile> files) {
  SavePlan plan;
  plan.directory = directory_;
  plan.partial = directory_ / partial_folder_name(step, fmt::format("{}-{}", tag_, num_saves_++));
  plan.step = step;
  plan.start = std::chrono::steady_clock::now();
  plan.rank = world_->rank();
  plan.ranks = world_->size();
  plan.metadata = metadata_json;
  plan.files = std::move(files);
  plan.blocks = {options_.block_bytes, options_.threads, options_.bytes_per_second};
  plan.retention = {options_.keep_last, options_.keep_every, kept_steps_};
  RankRecord own;
  try {
    CHECK(step >= 0, "[checkpoint] step {} is negative", step);
    plan.image = FileImage(states, {{"format", "pt"},
                                    {"step", std::to_string(step)},
                                    {"rank", fmt::format("{} of {}", plan.rank, plan.ranks)}});
    own = describe(plan.image);
    own.values[0] += bytes_beside(plan);
  } catch (...) {
    own = RankRecord::of_current_exception();
  }
  const std::vector<RankRecord> planned = exchange_.gather(own, stream);
  if (first_failed(planned) >= 0) {
    report_failure(step, planned);
    return nullptr;
  }
  total_bytes_ = sum_of_bytes(planned);
  snapshot_target_ = options_.is_async ? reserve_snapshot(plan.image.bytes(), planned, stream)
                                       : nullptr;

  own = RankRecord();
  if (world_->rank() == 0) {
    try {
      require_space(directory_, total_bytes_, fmt::format("step {}", step));
      create_folders(plan.partial, kWho);
    } catch (...) {
      own = RankRecord::of_current_exception();
    }
  }
  const std::vector<RankRecord> created = exchange_.gather(own, stream);
  if (first_failed(created) >= 0) {
    report_failure(step, created);
    return nullptr;
  }
  return std::make_unique<SaveJob>(std::move(plan));
}

bool CheckpointWriter::save(std::int64_t step, std::span<const NamedState> states,
                            const std::string& metadata_json, Stream& stream,
                            std::vector<CheckpointFile> files) {
  const bool earlier_is_good = settle(stream);
  is_reported_ = false;
  job_ = prepare(step, states, metadata_json, stream, std::move(files));
  if (!job_) return false;
  if (options_.is_async) {
    start_async(snapshot_target_, stream);
    return earlier_is_good;
  }
  job_->write(stream);
  return settle(stream) && earlier_is_good;
}

RankRecord CheckpointWriter::describe(const FileImage& image) const {
  RankRecord record;
  record.values[0] = image.bytes();
  record.values[1] = std::hash<std::string>{}(host_name());
  record.values[2] = snapshot_memory_.missing(image.bytes());
  record.values[3] = static_cast<std::uint64_t>(available_host_bytes());
  return record;
}

// Memory for this rank's copies, or null where its host has not enough for all of its ranks: pinned
// memory that does not exist ends the process rather than the call.
char* CheckpointWriter::reserve_snapshot(std::uint64_t image_bytes,
                                         const std::vector<RankRecord>& ranks, Stream& stream) {
  const RankRecord& own = ranks[static_cast<std::size_t>(world_->rank())];
  std::uint64_t missing = 0;
  std::uint64_t available = own.values[3];
  for (const RankRecord& rank : ranks) {
    if (rank.values[1] != own.values[1]) continue;
    missing += rank.values[2];
    available = std::min(available, rank.values[3]);
  }
  // A tenth stays for everything else.
  if (missing <= available / 10 * 9) {
    try {
      return snapshot_memory_.reserve(stream.context(), image_bytes);
    } catch (const Error&) {  // the warning below says it
    }
  }
  if (std::exchange(has_warned_, true)) return nullptr;
  log::warning(
      "[checkpoint] the copies of an asynchronous save take {} bytes of host memory on {}, {} are "
      "available: saves are written before training goes on",
      missing, host_name(), available);
  return nullptr;
}

void CheckpointWriter::start_async(char* memory, Stream& stream) {
  if (memory == nullptr) {
    job_->write(stream);
    job_->run_in_background(nullptr);
    return;
  }
  if (!copy_stream_) copy_stream_ = stream.context().make_stream("checkpoint");
  auto snapshot = std::make_unique<Snapshot>(job_->plan().image, options_.block_bytes, memory,
                                             stream, *copy_stream_);
  snapshot_ = snapshot.get();
  job_->run_in_background(std::move(snapshot));
}

void CheckpointWriter::before_update(Stream& stream) {
  if (snapshot_ != nullptr) snapshot_->order_before(stream);
}

bool CheckpointWriter::finish(Stream& stream) { return settle(stream); }

bool CheckpointWriter::settle(Stream& stream) {
  if (!job_) return true;
  const std::int64_t step = job_->plan().step;
  const RankRecord own = job_->wait_written();
  const std::vector<RankRecord> written = exchange_.gather(own, stream);
  std::unique_ptr<SaveJob> job = std::move(job_);
  snapshot_ = nullptr;
  if (first_failed(written) >= 0) {
    job->cancel();
    job->wait_finished(options_.timeout_seconds);
    if (world_->rank() == 0) job->remove_partial();
    return report_failure(step, written);
  }
  RankRecord outcome;
  if (world_->rank() == 0) {
    if (!options_.is_async) job->commit();
    outcome = job->wait_committed(options_.timeout_seconds);
    if (!outcome.is_ok) {
      job->cancel();
      job->wait_finished(options_.timeout_seconds);
      job->remove_partial();
    }
  }
  const std::vector<RankRecord> committed = exchange_.gather(outcome, stream);
  if (!committed[0].is_ok) return report_failure(step, committed);
  if (!is_reported_) outcomes_.push_back(good_outcome(step, committed[0]));
  return true;
}

SaveOutcome CheckpointWriter::good_outcome(std::int64_t step, const RankRecord& committed) const {
  SaveOutcome outcome;
  outcome.step = step;
  outcome.is_saved = true;
  outcome.bytes = total_bytes_;
  outcome.warning = committed.text;
  outcome.seconds = static_cast<double>(committed.values[0]) * 1e-6;
  return outcome;
}

std::vector<SaveOutcome> CheckpointWriter::take_outcomes() {
  if (job_ && !is_reported_) {
    const std::optional<RankRecord> committed = job_->committed();
    if (committed && committed->is_ok) {
      outcomes_.push_back(good_outcome(job_->plan().step, *committed));
      is_reported_ = true;
    }
  }
  return std::exchange(outcomes_, {});
}

void CheckpointWriter::check_space(std::span<const NamedState> states, Stream& stream) {
  RankRecord own;
  std::uint64_t image_bytes = 0;
  try {
    const FileImage image(states, {});
    image_bytes = image.bytes();
    own = describe(image);
  } catch (...) {
    own = RankRecord::of_current_exception();
  }
  const std::vector<RankRecord> planned = exchange_.gather(own, stream);
  own = RankRecord();
  if (first_failed(planned) < 0 && world_->rank() == 0) {
    try {
      require_space(directory_, sum_of_bytes(planned), "a checkpoint of this run");
    } catch (...) {
      own = RankRecord::of_current_exception();
    }
  }
  const std::vector<RankRecord> checked = exchange_.gather(own, stream);
  for (const std::vector<RankRecord>* records : {&planned, &checked}) {
    const int failed = first_failed(*records);
    if (failed >= 0) {
      const RankRecord& record = (*records)[static_cast<std::size_t>(failed)];
      throw_record(record, record.text);
    }
  }
  if (options_.is_async) reserve_snapshot(image_bytes, planned, stream);
}

}  // namespace tessera
