// Rates of a device under load: what the time of a step is held against. A GPU at its power limit
// slows down within seconds, so each rate is taken over seconds, first and last.
#pragma once

#include <string>
#include <vector>

#include "engine/device/context.h"
#include "engine/plan/step_work.h"
#include "kernels/attention.h"

namespace tessera {

struct SoakedRate {
  double burst = 0;   // per second, of the first moments; 0: nothing of the kind to measure
  double soaked = 0;  // of the second half of the time
};

// FLOP/s of a list of products in the proportion in which a micro-batch runs them (a step has
// `micro_batches`): those of `work` that are in FP8, or the others.
SoakedRate soak_products(BackendContext& context, const StepWork& work,
                         const RuntimeOptions& options, std::int64_t micro_batches, bool fp8,
                         double seconds);

struct AttentionRates {
  SoakedRate forward;
  SoakedRate backward;
};
// FLOP/s of attention over rows that are one document each, counted as StepWork does.
AttentionRates soak_attention(BackendContext& context, const AttentionShape& shape, DType dtype,
                              std::int64_t rows, bool deterministic, double seconds);

// Bytes per second, read and written, of a large copy on the device; the median of ten.
double copy_rate(BackendContext& context);

// FLOP/s of C = A B of square fp32 matrices, the median over `seconds`: on a CPU, OpenBLAS's sgemm.
double square_product_rate(BackendContext& context, std::int64_t size, double seconds);

}  // namespace tessera
