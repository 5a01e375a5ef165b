#include "tests/engine/train/golden_harness.h"

#include "engine/core/error.h"

namespace tessera::test {

using Json = nlohmann::json;

Json stories_case(const Json& reference, const std::string& name) {
  for (const Json& entry : reference.at("cases")) {
    if (entry.at("name") == name) return entry;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[test] the reference has no case {}", name);
}

HostBatch stories_batch(const Json& entry) {
  HostBatch batch;
  batch.tokens = entry.at("input_ids").get<std::vector<std::int32_t>>();
  batch.targets = entry.at("labels").get<std::vector<std::int32_t>>();
  if (entry.contains("position_ids")) {
    batch.positions = entry.at("position_ids").get<std::vector<std::int32_t>>();
  } else {
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      batch.positions.push_back(static_cast<std::int32_t>(i));
    }
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    if (batch.positions[i] == 0) batch.documents.push_back(static_cast<std::int32_t>(i));
  }
  batch.documents.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  return batch;
}

HostBatch hf_batch(const Json& row) {
  HostBatch batch;
  batch.tokens = row.at("input_ids").get<std::vector<std::int32_t>>();
  batch.targets = row.at("labels").get<std::vector<std::int32_t>>();
  batch.documents.push_back(0);
  for (const std::int32_t length : row.at("document_lengths").get<std::vector<std::int32_t>>()) {
    for (std::int32_t i = 0; i < length; ++i) batch.positions.push_back(i);
    batch.documents.push_back(batch.documents.back() + length);
  }
  return batch;
}

}  // namespace tessera::test
