#include "models/stage_split.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {

std::vector<StagePiece> whole_model(const ModelConfig& config) {
  return {{0, static_cast<int>(config.num_hidden_layers), true, true}};
}

double head_cost_in_blocks(const ModelConfig& config, std::int64_t sequence_length) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const auto q = static_cast<double>(config.query_size());
  const auto kv = static_cast<double>(config.key_value_size());
  const auto ffn = static_cast<double>(config.intermediate_size);
  // Multiply-adds per token: the products, and attention over half of the square on average.
  const double block =
      hidden * (2 * q + 2 * kv) + 3 * hidden * ffn + static_cast<double>(sequence_length) * q;
  return hidden * static_cast<double>(config.vocab_size) / block;
}

std::vector<StagePiece> split_model(const ModelConfig& config, int pieces,
                                    std::int64_t sequence_length) {
  const int layers = static_cast<int>(config.num_hidden_layers);
  CHECK_USER(pieces >= 1 && layers >= pieces,
             "[config] parallel.pipeline times parallel.virtual_stages is {}, but the model has {} "
             "blocks to give to them; use at most that many",
             pieces, layers);
  const double head = head_cost_in_blocks(config, sequence_length);
  // The last piece has k blocks and the head, the others share the rest as evenly as whole blocks
  // allow.
  int last = 1;
  double best = -1;
  for (int k = 1; k <= layers - (pieces - 1); ++k) {
    const int others = pieces > 1 ? (layers - k + pieces - 2) / (pieces - 1) : 0;
    if (pieces == 1 && k != layers) continue;
    const double cost = std::max(static_cast<double>(others), k + head);
    if (best >= 0 && cost > best) continue;  // of equal cuts, more blocks at the end
    best = cost;
    last = k;
  }
  std::vector<StagePiece> result;
  int first = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    const bool is_last = piece + 1 == pieces;
    const int rest = layers - last;
    const int count =
        is_last ? last : rest * (piece + 1) / (pieces - 1) - rest * piece / (pieces - 1);
    result.push_back({first, count, piece == 0, is_last});
    first += count;
  }
  return result;
}

std::vector<StagePiece> stage_pieces(const ModelConfig& config, int stages, int chunks, int rank,
                                     std::int64_t sequence_length) {
  const std::vector<StagePiece> all = split_model(config, stages * chunks, sequence_length);
  std::vector<StagePiece> result;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    result.push_back(all[static_cast<std::size_t>(chunk * stages + rank)]);
  }
  return result;
}

std::vector<int> stages_of_layers(const ModelConfig& config, int stages, int chunks,
                                  std::int64_t sequence_length) {
  std::vector<int> result(static_cast<std::size_t>(config.num_hidden_layers));
  int number = 0;
  for (const StagePiece& piece : split_model(config, stages * chunks, sequence_length)) {
    for (int i = 0; i < piece.num_layers; ++i) {
      result[static_cast<std::size_t>(piece.first_layer + i)] = number % stages;
    }
    ++number;
  }
  return result;
}

}  // namespace tessera
