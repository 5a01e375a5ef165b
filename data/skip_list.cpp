#include "data/skip_list.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>

#include "data/content_hash.h"
#include "data/readers/line_reader.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {

std::vector<StepRange> parse_step_ranges(const std::vector<std::string>& texts) {
  std::vector<StepRange> ranges;
  for (const std::string& text : texts) {
    const std::size_t dash = text.find('-');
    const auto first = parse_integer(text.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_integer(text.substr(dash + 1));
    CHECK_USER(first && last && *first >= 1 && *last >= *first,
               "[data] skip_steps has {}, expected a step or a range of steps such as 1200-1250",
               text);
    ranges.push_back({*first - 1, *last});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const StepRange& a, const StepRange& b) { return a.begin < b.begin; });
  std::vector<StepRange> joined;
  for (const StepRange& range : ranges) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

std::int64_t data_step_of(const std::vector<StepRange>& skipped, std::int64_t step) {
  for (const StepRange& range : skipped) {
    if (range.begin > step) break;
    step += range.end - range.begin;
  }
  return step;
}

RecordSkipList::RecordSkipList(const std::string& path) {
  LineReader lines(path);
  std::string line;
  while (lines.next(line)) {
    const std::size_t start = line.find_first_not_of(" \t");
    if (start == std::string::npos || line[start] == '#') continue;
    constexpr std::string_view kWord = " record ";
    const std::size_t word = line.rfind(kWord);
    std::optional<std::int64_t> record;
    if (word != std::string::npos) {
      const std::size_t number = word + kWord.size();
      record = parse_integer(line.substr(number, line.find(' ', number) - number));
    }
    CHECK_USER(record && *record >= 0, "[data] {}:{}: expected FILE record NUMBER", path,
               lines.line_number());
    const std::string file = line.substr(start, word - start);
    std::error_code code;
    const auto full = std::filesystem::canonical(file, code);
    records_[code ? file : full.string()].insert(*record);
  }
}

bool RecordSkipList::contains(const std::string& file, std::int64_t record) const {
  const auto found = records_.find(file);
  return found != records_.end() && found->second.count(record) > 0;
}

std::string RecordSkipList::fingerprint() const {
  if (records_.empty()) return "";
  ContentHash hash;
  for (const auto& [file, records] : records_) {
    hash.add(file);
    for (const std::int64_t record : records) hash.add(record);
  }
  return hash.hex();
}

}  // namespace tessera
