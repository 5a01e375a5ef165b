// Data that is passed over: steps whose rows made trouble, and single records.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {

// Steps [begin, end) counted from 0.
struct StepRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// From data.skip_steps: "1200" or "1200-1250", counted from 1 as in the log, both ends included.
// Sorted and joined. Throws kUser.
std::vector<StepRange> parse_step_ranges(const std::vector<std::string>& texts);

// The step of the data that the step of the run takes: those in the list are left out, those behind
// move up.
std::int64_t data_step_of(const std::vector<StepRange>& skipped, std::int64_t step);

// Records by file, counted from 0 as in the provenance of a step.
class RecordSkipList {
 public:
  RecordSkipList() = default;
  // One record a line: "corpus/a.jsonl record 17", whatever follows; blank lines and # comments.
  explicit RecordSkipList(const std::string& path);

  bool is_empty() const { return records_.empty(); }
  bool contains(const std::string& file, std::int64_t record) const;
  std::string fingerprint() const;  // empty for an empty list

 private:
  std::map<std::string, std::set<std::int64_t>> records_;
};

}  // namespace tessera
