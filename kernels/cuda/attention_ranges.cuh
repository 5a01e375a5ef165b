// Which pairs of rows see each other under causal attention over packed documents. A row's partners
// are one range, so a tile may span documents: each of its rows carries its range and the tile
// works through their union.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

// Rows [begin, end).
struct Range {
  int begin;
  int end;
};

// Last document that starts at or before `row`; documents at the end may be empty.
__device__ __forceinline__ int document_of(const std::int32_t* cu, int documents, int row) {
  int low = 0;
  int high = documents;  // cu[low] <= row < cu[high] is kept
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The keys that query row `t` sees; empty past the last document. `a` has cu_q, cu_k, documents,
// window, queries and keys.
template <typename Arguments>
__device__ __forceinline__ Range keys_of_query(const Arguments& a, int t) {
  if (t >= a.queries || t >= a.cu_q[a.documents]) return {0, 0};
  const int d = document_of(a.cu_q, a.documents, t);
  const int end = a.cu_k[d + 1] - (a.cu_q[d + 1] - 1 - t);
  const int begin = a.window > 0 ? max(a.cu_k[d], end - a.window) : a.cu_k[d];
  return {begin, max(begin, end)};
}

// The queries that see key row `j`.
template <typename Arguments>
__device__ __forceinline__ Range queries_of_key(const Arguments& a, int j) {
  if (j >= a.keys || j >= a.cu_k[a.documents]) return {0, 0};
  const int d = document_of(a.cu_k, a.documents, j);
  const int first = a.cu_q[d + 1] - a.cu_k[d + 1] + j;  // the query whose last key is j
  const int begin = max(a.cu_q[d], first);
  const std::int64_t last = static_cast<std::int64_t>(first) + a.window;
  const int end = a.window > 0 && last < a.cu_q[d + 1] ? static_cast<int>(last) : a.cu_q[d + 1];
  return {begin, max(begin, end)};
}

// Smallest begin and largest end of the non-empty ranges of `count` rows.
__device__ __forceinline__ Range union_of(const Range* ranges, int count) {
  Range all{0x7fffffff, 0};
  for (int i = 0; i < count; ++i) {
    if (ranges[i].begin >= ranges[i].end) continue;
    all.begin = min(all.begin, ranges[i].begin);
    all.end = max(all.end, ranges[i].end);
  }
  if (all.end == 0) all.begin = 0;
  return all;
}

// What every one of the `count` rows sees; begin >= end if there is nothing.
__device__ __forceinline__ Range intersection_of(const Range* ranges, int count) {
  Range all{0, 0x7fffffff};
  for (int i = 0; i < count; ++i) {
    all.begin = max(all.begin, ranges[i].begin);
    all.end = min(all.end, ranges[i].end);
  }
  return all;
}

}  // namespace tessera::cuda
