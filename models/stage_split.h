// StageSplit: which blocks of a model each piece of a pipeline holds. A pure function, shared by
// the model, the planner and tests.
#pragma once

#include <cstdint>
#include <vector>

#include "models/config.h"

namespace tessera {

// A run of blocks that a rank computes in one go, with what stands before the first and behind the
// last of the model.
struct StagePiece {
  int first_layer = 0;
  int num_layers = 0;
  bool has_embedding = false;
  bool has_head = false;
};

// A model in one piece.
std::vector<StagePiece> whole_model(const ModelConfig& config);

// Work of the head beside that of a block, in floating-point operations.
double head_cost_in_blocks(const ModelConfig& config, std::int64_t sequence_length);

// Cuts the blocks into `pieces` runs of at least one so that the most expensive piece is as cheap
// as can be; the last also has the head, which weighs as much as head_cost_in_blocks says. What is
// left open goes to later pieces, which keep fewer micro-batches. kUser, naming the numbers, where
// there are fewer blocks than pieces.
std::vector<StagePiece> split_model(const ModelConfig& config, int pieces,
                                    std::int64_t sequence_length);

// The pieces of rank `rank` of `stages`, chunk by chunk: piece chunk * stages + rank.
std::vector<StagePiece> stage_pieces(const ModelConfig& config, int stages, int chunks, int rank,
                                     std::int64_t sequence_length);

// The rank of the pipeline that holds each block.
std::vector<int> stages_of_layers(const ModelConfig& config, int stages, int chunks,
                                  std::int64_t sequence_length);

}  // namespace tessera
