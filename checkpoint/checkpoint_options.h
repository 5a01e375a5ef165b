// The `checkpoint` section of a run: when the state is saved, where, and how much of it is kept.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct ExportOptions {
  std::optional<std::int64_t> every_steps;

  void visit(FieldVisitor& v) {
    v.field("every_steps", every_steps,
            "Write a Hugging Face folder exports/step-N every so many steps; `final` is always "
            "written at the end",
            {.at_least = 1, .free_on_resume = true});
  }
};

struct CheckpointOptions {
  std::optional<std::int64_t> every_steps;
  std::optional<double> every_minutes;
  std::int64_t keep_last = 2;
  std::optional<std::int64_t> keep_every;
  std::optional<std::string> dir;
  std::string contents = "full";
  std::string on_error = "continue";
  ExportOptions exports;

  void visit(FieldVisitor& v) {
    v.field("every_steps", every_steps,
            "Save every so many steps; a checkpoint is also written at the end and when a run is "
            "stopped",
            {.aliases = {"save_steps", "save_interval", "interval"},
             .at_least = 1,
             .free_on_resume = true});
    v.field("every_minutes", every_minutes, "Save at the first step after so many minutes",
            {.above = 0, .free_on_resume = true});
    v.field("keep_last", keep_last, "Newest checkpoints that are kept; 0 keeps all",
            {.aliases = {"save_total_limit", "keep_latest_k"}, .at_least = 0, .free_on_resume = true});
    v.field("keep_every", keep_every, "Keep every checkpoint whose step is a multiple of this, too",
            {.at_least = 1, .free_on_resume = true});
    v.field("dir", dir,
            "Folder, shared by all nodes; unset: checkpoints in run.dir",
            {.free_on_resume = true, .is_path = true});
    v.field("contents", contents, "full: all that a resume needs; weights: the weights alone",
            {.aliases = {"save_only_model"},
             .choices = {"full", "weights"},
             .value_aliases = {{"true", "weights"}, {"false", "full"}},
             .free_on_resume = true});
    v.field("on_error", on_error, "What a run does when a checkpoint cannot be written",
            {.choices = {"continue", "stop"}, .free_on_resume = true});
    v.section("export", exports, "Hugging Face folders along the way");
  }
};

}  // namespace tessera
