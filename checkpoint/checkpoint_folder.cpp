#include "checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>
#include <utility>

#include "checkpoint/posix_file.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "checkpoint";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kRemoved = ".removed";
constexpr std::string_view kReplaced = ".replaced";
constexpr std::uint64_t kLargestCommitFile = std::uint64_t{64} << 20;

// The step and the rest of "step-000500<rest>".
std::optional<std::pair<std::int64_t, std::string_view>> split_step_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  if (digits < 6 || (digits > 6 && name.front() == '0')) return std::nullopt;
  std::int64_t step = 0;
  const auto result = std::from_chars(name.data(), name.data() + digits, step);
  if (result.ec != std::errc()) return std::nullopt;
  return std::pair(step, name.substr(digits));
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(directory, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    names.push_back(entries->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] reading the folder {} failed: {}",
                 directory.string(), error.message());
  }
  return names;
}

// Exchanges two names in one step, where the file system can.
bool exchange_names(const fs::path& a, const fs::path& b) {
#if defined(SYS_renameat2)
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  return ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kExchange) == 0;
#else
  return false;
#endif
}

void write_marker_text(const fs::path& path, std::int64_t step) {
  const std::string text = step_folder_name(step) + "\n";
  try {
    const FileHandle file = create_for_writing(path, kWho);
    write_all(file, text.data(), text.size(), path, kWho);
    sync_file(file, path, kWho);
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

CheckpointInfo inspect(const fs::path& path, std::int64_t step) {
  CheckpointInfo info;
  info.path = path;
  info.step = step;
  try {
    const CommitRecord record = read_commit_record(path);
    info.sequence = record.sequence;
    info.bytes = record.total_bytes();
    if (record.step != step) {
      info.problem = fmt::format("[checkpoint] {} holds step {}", path.string(), record.step);
    }
  } catch (const Error& error) {
    info.problem = error.what();
  }
  return info;
}

}  // namespace

std::string step_folder_name(std::int64_t step) { return fmt::format("step-{:06}", step); }

std::optional<std::int64_t> parse_step_folder_name(std::string_view name) {
  const auto parts = split_step_name(name);
  if (!parts || !parts->second.empty()) return std::nullopt;
  return parts->first;
}

std::string partial_folder_name(std::int64_t step, std::string_view tag) {
  return fmt::format("{}{}{}", step_folder_name(step), kPartial, tag);
}
std::string removed_folder_name(std::int64_t step) {
  return fmt::format("{}{}", step_folder_name(step), kRemoved);
}
std::string replaced_folder_name(std::int64_t step) {
  return fmt::format("{}{}", step_folder_name(step), kReplaced);
}

CommitRecord read_commit_record(const fs::path& checkpoint) {
  const fs::path path = checkpoint / kCommitFile;
  const std::string name = path.string();
  const CommitRecord record = parse_commit(read_text_file(path, kLargestCommitFile, kWho), name);
  for (const auto& [file, committed] : record.files) {
    struct stat status;
    const fs::path place = checkpoint / file;
    if (::stat(place.c_str(), &status) != 0) {
      const int error = errno;
      CHECK_USER(error != ENOENT, "[checkpoint] {} is missing", place.string());
      TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] looking at {} failed: {}", place.string(),
                   std::generic_category().message(error));
    }
    CHECK_USER(S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) == committed.bytes,
               "[checkpoint] {} has {} bytes, wanted {}: it was cut or changed after it was saved",
               place.string(), status.st_size, committed.bytes);
  }
  for (const std::string_view needed : {kIndexFile, kMetadataFile}) {
    CHECK_USER(record.files.contains(needed), "[checkpoint] {} names no {}", name, needed);
  }
  return record;
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& directory) {
  std::vector<CheckpointInfo> result;
  std::set<std::int64_t> steps;
  std::vector<std::int64_t> replaced;
  for (const std::string& name : names_in(directory)) {
    if (const auto step = parse_step_folder_name(name)) {
      steps.insert(*step);
      result.push_back(inspect(directory / name, *step));
    } else if (const auto parts = split_step_name(name); parts && parts->second == kReplaced) {
      replaced.push_back(parts->first);
    }
  }
  // Set aside by a replacement that never came to its end.
  for (const std::int64_t step : replaced) {
    if (!steps.contains(step)) {
      result.push_back(inspect(directory / replaced_folder_name(step), step));
    }
  }
  std::sort(result.begin(), result.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    if (a.is_complete() != b.is_complete()) return a.is_complete();
    return std::pair(a.sequence, a.step) > std::pair(b.sequence, b.step);
  });
  return result;
}

std::optional<fs::path> find_latest_checkpoint(const fs::path& directory, std::string* note) {
  const std::vector<CheckpointInfo> found = list_checkpoints(directory);
  const auto remark = [&](std::string text) {
    if (note == nullptr) return;
    if (!note->empty()) *note += "; ";
    *note += text;
  };
  for (const CheckpointInfo& info : found) {
    if (!info.is_complete()) remark(info.problem);
  }
  const std::optional<std::int64_t> latest = read_latest_marker(directory);
  const bool any = !found.empty() && found.front().is_complete();
  if (latest) {
    for (const CheckpointInfo& info : found) {
      if (info.step == *latest && info.is_complete()) return info.path;
    }
    remark(fmt::format("[checkpoint] {} names step {}, which is not there or not complete",
                       (directory / kLatestFile).string(), *latest));
  } else if (any) {
    remark(fmt::format("[checkpoint] {} is missing or names no step", (directory / kLatestFile).string()));
  }
  if (!any) return std::nullopt;
  return found.front().path;
}

std::optional<std::int64_t> read_latest_marker(const fs::path& directory) {
  std::string text;
  try {
    text = read_text_file(directory / kLatestFile, 4096, kWho);
  } catch (const Error&) {
    return std::nullopt;
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return parse_step_folder_name(text);
}

void publish_checkpoint(const fs::path& directory, const fs::path& partial, std::int64_t step) {
  const fs::path place = directory / step_folder_name(step);
  const fs::path aside = directory / replaced_folder_name(step);
  // The marker's text is on the disk before anything is renamed: a disk that is full now must leave the
  // earlier state, not a checkpoint that `latest` does not name.
  const fs::path latest = directory / kLatestFile;
  const fs::path next_latest = temporary_name(latest);
  write_marker_text(next_latest, step);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(place, ignored))) {
    if (exchange_names(partial, place)) {
      rename_file(partial, directory / removed_folder_name(step), kWho);
    } else {
      fs::remove_all(aside, ignored);
      rename_file(place, aside, kWho);
      rename_file(partial, place, kWho);
      sync_folder(directory, kWho);
      rename_file(aside, directory / removed_folder_name(step), kWho);
    }
    fs::remove_all(directory / removed_folder_name(step), ignored);
  } else {
    rename_file(partial, place, kWho);
  }
  sync_folder(directory, kWho);
  rename_file(next_latest, latest, kWho);
  sync_folder(directory, kWho);
}

void remove_partial_saves(const fs::path& directory) {
  const std::vector<std::string> names = names_in(directory);
  for (const std::string& name : names) {
    const auto parts = split_step_name(name);
    if (!parts || parts->second != kReplaced) continue;
    const fs::path place = directory / step_folder_name(parts->first);
    std::error_code error;
    if (!fs::exists(place, error)) {
      rename_file(directory / name, place, kWho);
      sync_folder(directory, kWho);
    }
  }
  for (const std::string& name : names) {
    const auto parts = split_step_name(name);
    const bool is_leftover_folder =
        parts && (parts->second.starts_with(kPartial) || parts->second == kRemoved ||
                  parts->second == kReplaced);
    const bool is_leftover_file =
        name.starts_with(fmt::format(".{}.tmp-", kLatestFile)) || name.starts_with(".probe-");
    if (!is_leftover_folder && !is_leftover_file) continue;
    std::error_code error;
    fs::remove_all(directory / name, error);
    if (error) {
      TESSERA_FAIL(ErrorKind::kTransient,
                   "[checkpoint] removing {}, left by an interrupted save, failed: {}",
                   (directory / name).string(), error.message());
    }
  }
}

void remove_all_saves(const fs::path& directory) {
  remove_partial_saves(directory);
  std::vector<std::string> names = names_in(directory);
  std::erase_if(names, [&](const std::string& name) {
    std::error_code error;
    return name != kLatestFile &&
           !(parse_step_folder_name(name) && fs::is_directory(directory / name, error));
  });
  // First what names a save.
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& name) { return name == kLatestFile; });
  for (const std::string& name : names) {
    std::error_code error;
    fs::remove_all(directory / name, error);
    if (error) {
      TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] removing {} failed: {}",
                   (directory / name).string(), error.message());
    }
  }
}

std::vector<std::int64_t> steps_to_remove(const std::vector<CheckpointInfo>& complete,
                                          std::optional<std::int64_t> latest,
                                          const RetentionPolicy& policy) {
  std::vector<std::int64_t> result;
  if (policy.keep_last <= 0) return result;
  for (std::size_t i = 1; i < complete.size(); ++i) {
    const std::int64_t step = complete[i].step;
    const bool is_kept = i < static_cast<std::size_t>(policy.keep_last) || step == latest ||
                         (policy.keep_every > 0 && step % policy.keep_every == 0) ||
                         policy.keep_steps.contains(step);
    if (!is_kept) result.push_back(step);
  }
  return result;
}

std::string remove_old_checkpoints(const fs::path& directory, const RetentionPolicy& policy) {
  std::string problems;
  try {
    std::vector<CheckpointInfo> complete = list_checkpoints(directory);
    std::erase_if(complete, [](const CheckpointInfo& info) { return !info.is_complete(); });
    for (const std::int64_t step :
         steps_to_remove(complete, read_latest_marker(directory), policy)) {
      // Under another name first: a removal that is interrupted must not leave half a checkpoint.
      const fs::path doomed = directory / removed_folder_name(step);
      std::error_code error;
      fs::remove_all(doomed, error);
      fs::rename(directory / step_folder_name(step), doomed, error);
      if (!error) fs::remove_all(doomed, error);
      if (error) {
        problems += fmt::format("[checkpoint] removing {} failed: {}. ",
                                (directory / step_folder_name(step)).string(), error.message());
      }
    }
  } catch (const Error& error) {
    problems += error.what();
  }
  return problems;
}

}  // namespace tessera
