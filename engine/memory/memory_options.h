// The `memory` section of a run: what is kept and what is computed again.
#pragma once

#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct MemoryOptions {
  std::string recompute = "auto";
  std::optional<std::string> limit;

  void visit(FieldVisitor& v) {
    v.field("recompute", recompute,
            "Activations computed again in the backward. none: all are kept; selective: the cheap "
            "ones of each block are made again; full: only block inputs are kept; auto: the first of "
            "these that fits",
            {.aliases = {"recompute_granularity", "gradient_checkpointing", "activation_checkpoint"},
             .choices = {"auto", "none", "selective", "full"},
             .value_aliases = {{"true", "full"}, {"false", "none"}},
             .free_on_resume = true});
    v.field("limit", limit,
            "Memory that a rank may plan for; a run that needs more is refused before it starts",
            {.unit = "size", .free_on_resume = true});
  }
};

}  // namespace tessera
