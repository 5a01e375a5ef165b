// The folder of a run's checkpoints: step-000500/, step-001000/, ... and `latest`, a file that names the
// newest. A save is a folder of another name until its last step, a rename; so every step-* folder was
// once complete, and whatever else lies here is either a left-over or not ours.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_index.h"

namespace tessera {

inline constexpr std::string_view kLatestFile = "latest";

std::string step_folder_name(std::int64_t step);  // "step-000500"
// The step of "step-000500"; nothing for any other name.
std::optional<std::int64_t> parse_step_folder_name(std::string_view name);

// What a save is called until it is complete, and what a folder is called before it is removed or
// while it is being replaced. `tag` differs from save to save.
std::string partial_folder_name(std::int64_t step, std::string_view tag);
std::string removed_folder_name(std::int64_t step);
std::string replaced_folder_name(std::int64_t step);

// Reads commit.json and compares the files with it by size. Throws kUser with what is missing or cut.
CommitRecord read_commit_record(const std::filesystem::path& checkpoint);

struct CheckpointInfo {
  std::filesystem::path path;
  std::int64_t step = 0;
  std::uint64_t sequence = 0;  // order of the saves
  std::uint64_t bytes = 0;
  std::string problem;  // why it cannot be used; empty for a complete one

  bool is_complete() const { return problem.empty(); }
};

// All step-* folders, newest save first, those with a problem last. Empty if the folder is missing.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& directory);

// The checkpoint to resume from: the one that `latest` names or, where that is missing, broken or
// names a damaged one, the newest complete one. `note` receives what was passed over, if anything.
std::optional<std::filesystem::path> find_latest_checkpoint(const std::filesystem::path& directory,
                                                            std::string* note = nullptr);

// The step that `latest` names; nothing if it is missing or names none.
std::optional<std::int64_t> read_latest_marker(const std::filesystem::path& directory);

// Puts a complete save in its place: renames `partial` to step-*, replacing an earlier save of that
// step, makes the rename last and moves `latest`. After a crash at any point the earlier or the new
// save is found. kTransient on failure.
void publish_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& partial,
                        std::int64_t step);

// Removes what interrupted saves, removals and probes left; puts back a save whose replacement was
// interrupted. Touches no other names. Nothing may be saving into the folder.
void remove_partial_saves(const std::filesystem::path& directory);

// Removes every save, complete or not, and `latest`. Touches no other names. Nothing may be saving into
// the folder.
void remove_all_saves(const std::filesystem::path& directory);

struct RetentionPolicy {
  int keep_last = 2;             // the newest saves; 0 keeps all
  std::int64_t keep_every = 0;   // and every step divisible by it; 0: none
  std::set<std::int64_t> keep_steps;
};

// The steps to remove from `complete`, newest first; never the first nor `latest`.
std::vector<std::int64_t> steps_to_remove(const std::vector<CheckpointInfo>& complete,
                                          std::optional<std::int64_t> latest,
                                          const RetentionPolicy& policy);

// Applies the policy. Folders that are not complete checkpoints are left alone. Failures to remove
// are returned as text, not thrown: the save that came before them is good.
std::string remove_old_checkpoints(const std::filesystem::path& directory,
                                   const RetentionPolicy& policy);

}  // namespace tessera
