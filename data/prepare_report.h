// What preparation found and did, in words: a line for each source and for each set of rows.
#pragma once

#include <cstdint>
#include <string>

#include "data/data_options.h"
#include "data/label_alignment.h"
#include "data/packing.h"
#include "data/token_store.h"

namespace tessera {

// "corpus: 3 files, 120 records, 51234 tokens; 2 empty left out".
std::string describe_content(const DataSource& source, std::size_t files, const StoreCounts& counts,
                             LabelAlignment alignment);

// "corpus: 51 rows of 1024, 51114 target tokens, 97.9% full; 12 long records split". `role` may be
// empty.
std::string describe_rows(const DataSource& source, const std::string& role,
                          const PackingCounts& counts, std::int64_t sequence_length);

}  // namespace tessera
