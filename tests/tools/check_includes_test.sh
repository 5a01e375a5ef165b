#!/usr/bin/env bash
# Each kind of violation must be found, and a clean tree must pass.
set -euo pipefail
script=$(cd "$(dirname "$0")/../.." && pwd)/tools/check_includes
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failures=0

write() { mkdir -p "$tree/$(dirname "$1")" && printf '%s\n' "${@:2}" > "$tree/$1"; }

clean_tree() {
  rm -rf "$tree" && mkdir -p "$tree"
  write engine/core/a.h '#pragma once' '#include <vector>'
  write engine/core/a.cpp '#include "engine/core/a.h"' '' '#include <fmt/format.h>' '#include <yaml-cpp/parser.h>'
  write kernels/gemm.h '#pragma once' '#include "engine/core/a.h"'
  write kernels/cuda/gemm.cpp '#include <cublasLt.h>' '#include "kernels/gemm.h"'
  write parallel/nccl/nccl.cpp '#include <nccl.h>' '#include <cuda_runtime.h>'
  write parallel/mpi/mpi.cpp '#include <mpi.h>'
  write models/m.h '#pragma once' '#include "kernels/gemm.h"'
  write tests/models/m_test.cpp '#include <gtest/gtest.h>' '#include "engine/train/t.h"' '#include "models/m.h"'
  write engine/train/t.h '#pragma once' '#include "models/m.h"'
}

# expect TEXT FILE LINES...: with FILE added, the check fails and says TEXT.
expect() {
  clean_tree
  write "${@:2}"
  local output status=0
  output=$("$script" "$tree" 2>&1) || status=$?
  if [[ $status -ne 1 || $output != *"$1"* ]]; then
    printf 'expected "%s" (exit 1), got exit %d:\n%s\n' "$1" "$status" "$output"
    failures=$((failures + 1))
  fi
}

clean_tree
if ! output=$("$script" "$tree" 2>&1); then
  printf 'the clean tree was refused:\n%s\n' "$output"
  failures=$((failures + 1))
fi

once='#pragma once'
expect 'engine/core/b.h:2 includes "models/m.h"; engine/core may not see models' engine/core/b.h "$once" '#include "models/m.h"'
expect 'kernels may not see engine/train' kernels/x.cpp '  #  include "engine/train/t.h"'
expect 'data may not see models' data/d.cpp '#include "models/m.h"'
expect 'models/c.cpp:1 includes <cuda_runtime.h>' models/c.cpp '#include <cuda_runtime.h>'
expect 'includes <nccl.h>' kernels/cuda/c.cpp '#include <nccl.h>'
expect 'includes <mpi.h>' parallel/p.cpp '#include <mpi.h>'
expect 'includes <cudnn.h>' kernels/a.cpp '#include <cudnn.h>'
expect 'only */cuda/ and parallel/nccl see' kernels/a.cpp '#include "kernels/cuda/gemm.cpp"'
expect 'includes <cublasLt.h> in a header' kernels/cuda/g.h "$once" '#include <cublasLt.h>'
expect 'includes <fmt/format.h> in a header' models/f.h "$once" '#include <fmt/format.h>'
expect 'includes <yaml-cpp/parser.h>' models/y.cpp '#include <yaml-cpp/parser.h>'
expect 'which does not exist' models/n.cpp '#include "models/nothing.h"'
expect 'write the path from the root' models/r.cpp '#include "m.h"'
expect 'write the path from the root' models/r.cpp '#include "../models/m.h"'
expect 'only tests include tests' models/t.cpp '#include "tests/models/m_test.cpp"'
expect 'has no #pragma once' models/p.h '#include <vector>'
expect 'comes first' models/m.cpp '#include <vector>' '#include "models/m.h"'
expect 'lies in no layer' engine/new/x.h "$once"

if [[ $failures -gt 0 ]]; then
  echo "[check_includes_test] $failures failed"
  exit 1
fi
echo "[check_includes_test] passed"
