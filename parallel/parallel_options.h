// The `parallel` section of a run: how the ranks share the work. Data parallelism takes what is
// left: ranks / (tensor * pipeline * context).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct ParallelOptions {
  std::int64_t tensor = 1;
  std::optional<bool> sequence_parallel;  // unset: on when tensor > 1
  std::int64_t pipeline = 1;
  std::string pipeline_schedule = "auto";
  std::int64_t virtual_stages = 1;
  std::int64_t context = 1;
  std::string shard_group = "all";
  bool overlap = true;
  bool peer_copies = false;
  std::optional<std::int64_t> zero;  // unset: 1 where data or context parallelism shares it, else 0

  void visit(FieldVisitor& v) {
    v.field("tensor", tensor, "Ranks that share each layer's matrices (tensor parallelism)",
            {.aliases = {"tensor_parallel_size", "tensor_model_parallel_size",
                         "tensor_parallel_degree", "autotp_size"},
             .at_least = 1,
             .at_most = 1 << 16,
             .free_on_resume = true});
    v.field(
        "sequence_parallel", sequence_parallel,
        "Share the activations between blocks over the tensor-parallel ranks; auto: when tensor "
        "is above 1",
        {.unset_word = "auto", .free_on_resume = true});
    v.field("pipeline", pipeline, "Stages that the blocks are split into (pipeline parallelism)",
            {.aliases = {"pipeline_parallel_size", "pipeline_model_parallel_size",
                         "pipeline_parallel_degree"},
             .at_least = 1,
             .at_most = 1 << 16,
             .free_on_resume = true});
    v.field(
        "pipeline_schedule", pipeline_schedule,
        "Order of forwards and backwards. 1f1b: a stage keeps as many micro-batches as there are "
        "stages from it on; gpipe: all of a step; interleaved: 1f1b over several virtual stages "
        "per rank, which idles less; auto: interleaved where virtual_stages is above 1, else 1f1b",
        {.choices = {"auto", "gpipe", "1f1b", "interleaved"}, .free_on_resume = true});
    v.field("virtual_stages", virtual_stages,
            "Runs of blocks that each pipeline rank holds (interleaved schedule)",
            {.aliases = {"num_virtual_stages_per_pipeline_rank",
                         "virtual_pipeline_model_parallel_size"},
             .at_least = 1,
             .at_most = 1 << 10,
             .free_on_resume = true});
    v.field("context", context,
            "Ranks that share the tokens of each row, for rows that are too long for one (context "
            "parallelism); each computes about the same part of attention",
            {.aliases = {"context_parallel_size", "context_parallel_degree"},
             .at_least = 1,
             .at_most = 1 << 16,
             .free_on_resume = true});
    v.field("overlap", overlap,
            "Communication on streams of its own, behind computation. false: the same messages one "
            "after another with it, for the same bits",
            {.free_on_resume = true});
    v.field("peer_copies", peer_copies,
            "Messages of tensor parallelism under sequence_parallel by copies into the memory of "
            "peers of the same machine, which take none of a GPU's processors, where that can be "
            "reached; for the same bits",
            {.free_on_resume = true});
    v.field(
        "shard_group", shard_group,
        "Which data-parallel ranks share what zero says. all: every one; node: those of a node, "
        "each node holding a whole copy, so that only sums of gradients cross nodes",
        {.choices = {"all", "node"}, .free_on_resume = true});
    v.field(
        "zero", zero,
        "What data- and context-parallel ranks share instead of each holding a copy. 0: nothing; "
        "1: optimizer "
        "states; 2: gradients too; 3: weights too; auto: 1 when there is data or context "
        "parallelism",
        {.aliases = {"zero_stage", "zero_level"},
         .unset_word = "auto",
         .at_least = 0,
         .at_most = 3,
         .free_on_resume = true});
  }
};

}  // namespace tessera
