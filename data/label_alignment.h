// Whether the labels of pre-tokenised rows belong to their own position or to the one before.
#pragma once

#include <functional>
#include <string>

#include "data/token_store.h"

namespace tessera {

// How the labels of a source are read (DataSource::labels).
enum class LabelAlignment {
  kNone,     // no record has labels: every next token is trained
  kAligned,  // labels[i] is input_ids[i] or ignored; pair i is trained if labels[i + 1] is not
             // ignored
  kShifted,  // labels[i] is the token behind input_ids[i]; pair i is trained if labels[i] is not
             // ignored
};

// Where the first label lies that contradicts the alignment, as "rows.jsonl:17".
using ConflictPlace = std::function<std::string(LabelAlignment)>;

// Decided from all records of the source, since a single row may look like both. `choice` is auto,
// aligned or shifted. Throws kUser where neither reading fits or both do, where the choice
// contradicts the labels, and where every label is ignored.
LabelAlignment choose_alignment(const std::string& source, const std::string& choice,
                                const LabelEvidence& labels, const ConflictPlace& conflict);

}  // namespace tessera
