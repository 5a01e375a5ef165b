// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/cases/attention_cases.h"
#include "tests/kernels/cases/block_scale_cases.h"
#include "tests/kernels/cases/cross_entropy_cases.h"
#include "tests/kernels/cases/elementwise_cases.h"
#include "tests/kernels/cases/embedding_cases.h"
#include "tests/kernels/cases/gemm_cases.h"
#include "tests/kernels/cases/norm_cases.h"
#include "tests/kernels/cases/optimizer_cases.h"
#include "tests/kernels/cases/quantize_cases.h"
#include "tests/kernels/cases/rope_cases.h"

namespace tessera::test {

inline std::vector<OpCase> all_op_cases() {
  std::vector<OpCase> cases;
  add_gemm_cases(cases);
  add_embedding_cases(cases);
  add_norm_cases(cases);
  add_rope_cases(cases);
  add_attention_cases(cases);
  add_elementwise_cases(cases);
  add_cross_entropy_cases(cases);
  add_optimizer_cases(cases);
  add_quantize_cases(cases);
  add_block_scale_cases(cases);
  return cases;
}

}  // namespace tessera::test
