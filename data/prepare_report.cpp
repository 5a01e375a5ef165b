#include "data/prepare_report.h"

#include <fmt/format.h>

namespace tessera {

std::string describe_content(const DataSource& source, std::size_t files, const StoreCounts& counts,
                             LabelAlignment alignment) {
  std::string line = source.path + ": ";
  if (files > 0) line += fmt::format("{} file{}, ", files, files == 1 ? "" : "s");
  line += fmt::format("{} record{}, {} tokens", counts.rows_read, counts.rows_read == 1 ? "" : "s",
                      counts.tokens);
  if (counts.rows_empty > 0) line += fmt::format("; {} empty left out", counts.rows_empty);
  if (counts.rows_bad > 0) {
    line += fmt::format("; {} unreadable skipped, the first {}", counts.rows_bad, counts.first_bad);
  }
  if (alignment != LabelAlignment::kNone) {
    const bool aligned = alignment == LabelAlignment::kAligned;
    line += fmt::format("; labels {}", aligned ? "aligned with the inputs" : "already shifted");
  }
  return line;
}

std::string describe_rows(const DataSource& source, const std::string& role,
                          const PackingCounts& counts, std::int64_t sequence_length) {
  const double places = static_cast<double>(counts.rows) * static_cast<double>(sequence_length);
  std::string line = fmt::format(
      "{}{}{}: {} rows of {}, {} target tokens, {:.1f}% full", source.path,
      role.empty() ? "" : ", ", role, counts.rows, sequence_length, counts.target_tokens,
      counts.rows > 0 ? 100.0 * static_cast<double>(counts.pairs) / places : 0.0);
  if (counts.split > 0)
    line += fmt::format("; {} long record{} split", counts.split, counts.split == 1 ? "" : "s");
  if (counts.cut > 0) {
    line += fmt::format("; {} cut, losing {} tokens", counts.cut, counts.cut_pairs);
  }
  if (counts.dropped > 0) line += fmt::format("; {} too long and dropped", counts.dropped);
  if (counts.too_short > 0) {
    line += fmt::format("; {} shorter than two tokens", counts.too_short);
  }
  if (counts.without_target > 0) {
    line += fmt::format("; {} without a target", counts.without_target);
  }
  if (counts.skipped > 0) line += fmt::format("; {} on the skip list", counts.skipped);
  return line;
}

}  // namespace tessera
