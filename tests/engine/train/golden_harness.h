// The rows of golden files as batches.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {

// A case of golden/stories260K_reference.json by name; fails the test where there is none.
nlohmann::json stories_case(const nlohmann::json& reference, const std::string& name);
// Its row: labels are shifted (the target of each position), positions begin anew with a document.
HostBatch stories_batch(const nlohmann::json& entry);

// A row of the golden.json of a model folder (tools/goldens/make_hf_goldens.py): aligned labels,
// lengths of the documents.
HostBatch hf_batch(const nlohmann::json& row);

}  // namespace tessera::test
