// The `memory` section of a run: what is kept and what is computed again.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/core/config.h"

namespace tessera {

struct MemoryOptions {
  std::string recompute = "auto";
  std::vector<std::string> offload;
  std::optional<std::string> mlp_chunk;
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
    v.field("offload", offload,
            "What lies in page-locked host memory. activations: the inputs of the blocks between "
            "forward and backward, under recompute full; optimizer: moments, and masters: exact "
            "weights, which come to the device piece by piece for an update; auto: of these, in this "
            "order, what is needed to fit",
            {.choices = {"activations", "optimizer", "masters", "auto"}, .free_on_resume = true});
    v.field("mlp_chunk", mlp_chunk,
            "Bytes of an MLP's widest activation above which it takes its tokens in chunks where "
            "nothing of a block but its input is kept; 1GiB by default",
            {.unit = "size", .free_on_resume = true});
    v.field("limit", limit,
            "Device memory that a rank may plan for; a run that needs more is refused before it starts",
            {.unit = "size", .free_on_resume = true});
  }
};

}  // namespace tessera
