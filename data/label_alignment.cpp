#include "data/label_alignment.h"

#include "engine/core/error.h"

namespace tessera {

LabelAlignment choose_alignment(const std::string& source, const std::string& choice,
                                const LabelEvidence& labels, const ConflictPlace& conflict) {
  if (labels.labelled_rows == 0) return LabelAlignment::kNone;
  CHECK_USER(
      labels.trained > 0,
      "[data] every label in {} is -100: nothing would be trained. Labels are token ids where "
      "the token is trained",
      source);
  const bool fits_aligned = labels.aligned_conflicts == 0;
  const bool fits_shifted = labels.shifted_conflicts == 0;
  if (choice != "auto") {
    const bool aligned = choice == "aligned";
    CHECK_USER(aligned ? fits_aligned : fits_shifted,
               "[data] {}: labels is set to {} but a label differs from the {} input id ({} such "
               "labels); correct the labels, or set labels: {}",
               conflict(aligned ? LabelAlignment::kAligned : LabelAlignment::kShifted), choice,
               aligned ? "same" : "next",
               aligned ? labels.aligned_conflicts : labels.shifted_conflicts,
               aligned ? "shifted" : "aligned");
    return aligned ? LabelAlignment::kAligned : LabelAlignment::kShifted;
  }
  CHECK_USER(
      fits_aligned || fits_shifted,
      "[data] the labels of {} are neither the input ids of the same position (first "
      "difference: {}) nor of the next one (first difference: {}); correct them, or leave them "
      "out to train every token",
      source, conflict(LabelAlignment::kAligned), conflict(LabelAlignment::kShifted));
  CHECK_USER(
      !(fits_aligned && fits_shifted),
      "[data] the labels of {} agree with the input ids of the same position and of the next "
      "one; say which is meant with labels: aligned (as in Hugging Face) or labels: shifted",
      source);
  return fits_aligned ? LabelAlignment::kAligned : LabelAlignment::kShifted;
}

}  // namespace tessera
