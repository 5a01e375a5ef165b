// Attention by blocks of 64 queries of one head and document: scores of the block against the keys it
// may see, softmax, product with the values. Full score matrices never exist. Backward recomputes the
// probabilities from lse; keys and values of a head sum over its queries in ascending order. Bound by
// arithmetic (OpenBLAS) and exp.
#include "kernels/attention.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/common.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kBlock = AttentionPlan::kBlock;

struct Document {
  std::int64_t q_begin, queries;  // rows of q
  std::int64_t k_begin, keys;     // rows of k and v
};

struct Bounds {
  const std::int32_t* q;
  const std::int32_t* k;
  Document operator[](std::int64_t d) const { return {q[d], q[d + 1] - q[d], k[d], k[d + 1] - k[d]}; }
};

// Reads the bounds, which only now have values, and refuses any that would reach outside the tensors.
Bounds checked_bounds(const char* op, const Tensor& cu_q, const Tensor& cu_k, std::int64_t q_rows,
                      std::int64_t k_rows, const AttentionPlan& plan) {
  const Bounds bounds{static_cast<const std::int32_t*>(cu_q.data),
                      static_cast<const std::int32_t*>(cu_k.data)};
  CHECK(bounds.q[0] == 0 && bounds.k[0] == 0, "[{}] bounds begin at {} and {}, expected 0", op,
        bounds.q[0], bounds.k[0]);
  for (std::int64_t d = 0; d < plan.documents; ++d) {
    const Document doc = bounds[d];
    CHECK(doc.queries >= 0 && doc.keys >= 0 && doc.q_begin + doc.queries <= q_rows &&
              doc.k_begin + doc.keys <= k_rows,
          "[{}] document {} has queries [{}, +{}) of {} and keys [{}, +{}) of {}", op, d, doc.q_begin,
          doc.queries, q_rows, doc.k_begin, doc.keys, k_rows);
    CHECK(doc.queries <= doc.keys, "[{}] document {} has {} queries but {} keys", op, d, doc.queries,
          doc.keys);
    CHECK(doc.keys <= plan.keys, "[{}] document {} has {} keys, expected at most max_length {}", op, d,
          doc.keys, plan.keys);
  }
  return bounds;
}

// What the queries [first, first + rows) of a document may see.
struct BlockView {
  std::int64_t first, rows;
  std::int64_t begin, keys;  // keys [begin, begin + keys) of the document

  static BlockView of(const Document& doc, const AttentionShape& shape, std::int64_t first) {
    BlockView view{first, std::min(kBlock, doc.queries - first), 0, 0};
    const std::int64_t position = doc.keys - doc.queries + first;
    view.begin = shape.window > 0 ? std::max<std::int64_t>(0, position - shape.window + 1) : 0;
    view.keys = position + view.rows - view.begin;
    return view;
  }
  // The columns of the score block that query `i` of the block sees.
  std::int64_t visible_begin(const Document& doc, const AttentionShape& shape, std::int64_t i) const {
    const std::int64_t position = doc.keys - doc.queries + first + i;
    return shape.window > 0 ? std::max<std::int64_t>(0, position - shape.window + 1 - begin) : 0;
  }
  std::int64_t visible_end(const Document& doc, std::int64_t i) const {
    return doc.keys - doc.queries + first + i + 1 - begin;
  }
};

// A head's columns of some rows, as the compute type: the tensor's memory or a converted panel.
template <typename C>
struct Panel {
  const C* data = nullptr;
  std::int64_t stride = 0;
};

template <typename T, typename C>
Panel<C> read_panel(const Tensor& t, std::int64_t first, std::int64_t rows, std::int64_t head,
                    std::int64_t head_dim, C* buffer) {
  const std::int64_t stride = std::max(t.row_stride, t.cols());
  if constexpr (std::is_same_v<T, C>) {
    return {row<T>(t, first) + head * head_dim, stride};
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* in = row<T>(t, first + i) + head * head_dim;
#pragma omp simd
      for (std::int64_t j = 0; j < head_dim; ++j) buffer[i * head_dim + j] = load(in[j]);
    }
    return {buffer, head_dim};
  }
}

template <typename C>
struct SlotScratch {
  C *scores, *dscores, *k, *v, *q, *dout, *result, *dk, *dv;

  SlotScratch(const AttentionPlan& plan, char* slots, int slot) {
    C* next = reinterpret_cast<C*>(slots + plan.slot_bytes() * static_cast<std::size_t>(slot));
    const auto take = [&next](std::int64_t n) { return std::exchange(next, next + n); };
    scores = take(plan.scores());
    dscores = take(plan.dscores());
    k = take(plan.key_panel());
    v = take(plan.key_panel());
    q = take(plan.query_panel());
    result = take(plan.query_panel());
    dout = plan.is_backward ? take(plan.query_panel()) : nullptr;
    dk = take(plan.gradient_panel());
    dv = take(plan.gradient_panel());
  }
};

// scores[rows, keys] = scale * q k^T for the block's keys.
template <typename C>
void multiply_keys(const BlockView& view, std::int64_t head_dim, C scale, const Panel<C>& q,
                   const Panel<C>& k, C* scores) {
  BlasGemm<C> call;
  call.transpose_b = true;
  call.m = view.rows, call.n = view.keys, call.k = head_dim;
  call.alpha = scale;
  call.a = q.data, call.lda = q.stride;
  call.b = k.data + view.begin * k.stride, call.ldb = k.stride;
  call.c = scores, call.ldc = view.keys;
  blas_gemm(call);
}

// out[rows, head_dim] = weights[rows, keys] x.
template <typename C>
void multiply_values(const BlockView& view, std::int64_t head_dim, const C* weights, const Panel<C>& x,
                     C* out, std::int64_t out_stride) {
  BlasGemm<C> call;
  call.m = view.rows, call.n = head_dim, call.k = view.keys;
  call.a = weights, call.lda = view.keys;
  call.b = x.data + view.begin * x.stride, call.ldb = x.stride;
  call.c = out, call.ldc = out_stride;
  blas_gemm(call);
}

// sum[keys, head_dim] += weights[rows, keys]^T x.
template <typename C>
void add_by_key(const BlockView& view, std::int64_t head_dim, const C* weights, const Panel<C>& x,
                C* sum) {
  BlasGemm<C> call;
  call.transpose_a = true;
  call.m = view.keys, call.n = head_dim, call.k = view.rows;
  call.a = weights, call.lda = view.keys;
  call.b = x.data, call.ldb = x.stride;
  call.beta = C(1);
  call.c = sum + view.begin * head_dim, call.ldc = head_dim;
  blas_gemm(call);
}

// Turns row `s` into exp(s - max) within [begin, end) and zeros elsewhere.
template <typename C>
void softmax_row(C* s, std::int64_t begin, std::int64_t end, std::int64_t keys, C* maximum, C* sum) {
  C top = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : top)
  for (std::int64_t j = begin; j < end; ++j) top = s[j] > top ? s[j] : top;
  C total = 0;
#pragma omp simd reduction(+ : total)
  for (std::int64_t j = begin; j < end; ++j) {
    s[j] = exp_of(s[j] - top);
    total += s[j];
  }
  std::fill(s, s + begin, C(0));
  std::fill(s + end, s + keys, C(0));
  *maximum = top;
  *sum = total;
}

template <typename T>
void forward_block(const AttentionForward& args, const Document& doc, std::int64_t head,
                   std::int64_t first, const SlotScratch<Compute<T>>& scratch) {
  using C = Compute<T>;
  const AttentionShape& shape = args.shape;
  const std::int64_t head_dim = shape.head_dim;
  const std::int64_t kv_head = head / (shape.heads_q / shape.heads_kv);
  const BlockView view = BlockView::of(doc, shape, first);
  const std::int64_t q_row = doc.q_begin + first;
  const Panel<C> q = read_panel<T>(args.q, q_row, view.rows, head, head_dim, scratch.q);
  // The panels of keys begin at the first one this block sees.
  BlockView local = view;
  local.begin = 0;
  const std::int64_t k_row = doc.k_begin + view.begin;
  const Panel<C> k = read_panel<T>(args.k, k_row, view.keys, kv_head, head_dim, scratch.k);
  const Panel<C> v = read_panel<T>(args.v, k_row, view.keys, kv_head, head_dim, scratch.v);
  multiply_keys(local, head_dim, static_cast<C>(shape.scale), q, k, scratch.scores);
  C factor[kBlock];
  for (std::int64_t i = 0; i < view.rows; ++i) {
    C maximum, sum;
    softmax_row(scratch.scores + i * view.keys, view.visible_begin(doc, shape, i),
                view.visible_end(doc, i), view.keys, &maximum, &sum);
    factor[i] = C(1) / sum;
    if (args.lse.defined()) row<C>(args.lse, q_row + i)[head] = maximum + std::log(sum);
  }
  C* result = scratch.result;
  std::int64_t stride = head_dim;
  if constexpr (std::is_same_v<T, C>) {
    result = row<T>(args.out, q_row) + head * head_dim;
    stride = std::max(args.out.row_stride, args.out.cols());
  }
  multiply_values(local, head_dim, scratch.scores, v, result, stride);
  for (std::int64_t i = 0; i < view.rows; ++i) {
    const C* in = result + i * stride;
    T* out = row<T>(args.out, q_row + i) + head * head_dim;
#pragma omp simd
    for (std::int64_t j = 0; j < head_dim; ++j) out[j] = store<T>(in[j] * factor[i]);
  }
}

// p = exp(s - lse) and ds = scale * p * (dp - delta) in place of s and dp, masked.
template <typename C>
void probabilities_row(C* s, C* dp, std::int64_t begin, std::int64_t end, std::int64_t keys, C lse,
                       C delta, C scale) {
#pragma omp simd
  for (std::int64_t j = begin; j < end; ++j) {
    const C p = exp_of(s[j] - lse);
    s[j] = p;
    dp[j] = scale * p * (dp[j] - delta);
  }
  std::fill(s, s + begin, C(0));
  std::fill(s + end, s + keys, C(0));
  std::fill(dp, dp + begin, C(0));
  std::fill(dp + end, dp + keys, C(0));
}

// dq of one block of queries; adds its share to the document's dk and dv.
template <typename T>
void backward_block(const AttentionBackward& args, const Document& doc, std::int64_t head,
                    std::int64_t first, const Panel<Compute<T>>& k, const Panel<Compute<T>>& v,
                    const SlotScratch<Compute<T>>& scratch) {
  using C = Compute<T>;
  const AttentionShape& shape = args.shape;
  const std::int64_t head_dim = shape.head_dim;
  const auto scale = static_cast<C>(shape.scale);
  const BlockView view = BlockView::of(doc, shape, first);
  const std::int64_t q_row = doc.q_begin + first;
  const Panel<C> q = read_panel<T>(args.q, q_row, view.rows, head, head_dim, scratch.q);
  const Panel<C> dout = read_panel<T>(args.dout, q_row, view.rows, head, head_dim, scratch.dout);
  multiply_keys(view, head_dim, scale, q, k, scratch.scores);
  multiply_keys(view, head_dim, C(1), dout, v, scratch.dscores);
  for (std::int64_t i = 0; i < view.rows; ++i) {
    const T* o = row<T>(args.out, q_row + i) + head * head_dim;
    const T* d = row<T>(args.dout, q_row + i) + head * head_dim;
    const auto delta = static_cast<C>(
        fixed_sum<C>(head_dim, [=](std::int64_t j) { return load(o[j]) * load(d[j]); }));
    probabilities_row(scratch.scores + i * view.keys, scratch.dscores + i * view.keys,
                      view.visible_begin(doc, shape, i), view.visible_end(doc, i), view.keys,
                      row<C>(args.lse, q_row + i)[head], delta, scale);
  }
  add_by_key(view, head_dim, scratch.scores, dout, scratch.dv);
  add_by_key(view, head_dim, scratch.dscores, q, scratch.dk);
  if constexpr (std::is_same_v<T, C>) {
    multiply_values(view, head_dim, scratch.dscores, k, row<T>(args.dq, q_row) + head * head_dim,
                    std::max(args.dq.row_stride, args.dq.cols()));
  } else {
    multiply_values(view, head_dim, scratch.dscores, k, scratch.result, head_dim);
    for (std::int64_t i = 0; i < view.rows; ++i) {
      T* out = row<T>(args.dq, q_row + i) + head * head_dim;
      for (std::int64_t j = 0; j < head_dim; ++j) out[j] = store<T>(scratch.result[i * head_dim + j]);
    }
  }
}

// One key head of one document: all its query heads, block after block.
template <typename T>
void backward_head(const AttentionBackward& args, const Document& doc, std::int64_t kv_head,
                   const SlotScratch<Compute<T>>& scratch) {
  using C = Compute<T>;
  const std::int64_t head_dim = args.shape.head_dim;
  const Panel<C> k = read_panel<T>(args.k, doc.k_begin, doc.keys, kv_head, head_dim, scratch.k);
  const Panel<C> v = read_panel<T>(args.v, doc.k_begin, doc.keys, kv_head, head_dim, scratch.v);
  std::fill(scratch.dk, scratch.dk + doc.keys * head_dim, C(0));
  std::fill(scratch.dv, scratch.dv + doc.keys * head_dim, C(0));
  const std::int64_t group = args.shape.heads_q / args.shape.heads_kv;
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (std::int64_t first = 0; first < doc.queries; first += kBlock) {
      backward_block<T>(args, doc, head, first, k, v, scratch);
    }
  }
  for (std::int64_t i = 0; i < doc.keys; ++i) {
    T* dk = row<T>(args.dk, doc.k_begin + i) + kv_head * head_dim;
    T* dv = row<T>(args.dv, doc.k_begin + i) + kv_head * head_dim;
    for (std::int64_t j = 0; j < head_dim; ++j) {
      dk[j] = store<T>(scratch.dk[i * head_dim + j]);
      dv[j] = store<T>(scratch.dv[i * head_dim + j]);
    }
  }
}

template <typename T>
void zero_rows_from(const Tensor& t, std::int64_t first) {
  for (std::int64_t i = first; i < t.rows(); ++i) std::fill_n(row<T>(t, i), t.cols(), T{});
}

}  // namespace

void attention_forward(const AttentionForward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const AttentionPlan plan = AttentionPlan::forward(args, cpu.team().threads());
  const auto scratch = take_scratch(stream, plan.bytes());
  cpu.enqueue([args, plan, memory = static_cast<char*>(scratch.data()), &team = cpu.team()] {
    for (const Tensor* t : {&args.q, &args.k, &args.v}) announce_rows_read(*t);
    announce_rows_write(args.out);
    const Bounds bounds = checked_bounds("attention_forward", args.cu_q, args.cu_k, args.q.rows(),
                                         args.k.rows(), plan);
    auto* first_block = reinterpret_cast<std::int64_t*>(memory);
    first_block[0] = 0;
    for (std::int64_t d = 0; d < plan.documents; ++d) {
      first_block[d + 1] = first_block[d] + (bounds[d].queries + kBlock - 1) / kBlock;
    }
    char* slots = memory + (plan.table_bytes() + 63) / 64 * 64;
    const std::int64_t heads = args.shape.heads_q;
    visit_float(args.q.dtype, [&]<typename T>(TypeTag<T>) {
      for_each_item(team, first_block[plan.documents] * heads, plan.slots,
                    [&](std::int64_t item, int slot) {
        const std::int64_t block = item / heads;
        const std::int64_t d =
            std::upper_bound(first_block, first_block + plan.documents + 1, block) - first_block - 1;
        forward_block<T>(args, bounds[d], item % heads, (block - first_block[d]) * kBlock,
                         SlotScratch<Compute<T>>(plan, slots, slot));
      });
      zero_rows_from<T>(args.out, bounds.q[plan.documents]);
    });
  });
}

void attention_backward(const AttentionBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const AttentionPlan plan = AttentionPlan::backward(args, cpu.team().threads());
  const auto scratch = take_scratch(stream, plan.bytes());
  cpu.enqueue([args, plan, memory = static_cast<char*>(scratch.data()), &team = cpu.team()] {
    for (const Tensor* t : {&args.q, &args.k, &args.v, &args.dout}) announce_rows_read(*t);
    announce_rows_write(args.dq);
    const Bounds bounds = checked_bounds("attention_backward", args.cu_q, args.cu_k, args.q.rows(),
                                         args.k.rows(), plan);
    char* slots = memory + (plan.table_bytes() + 63) / 64 * 64;
    const std::int64_t heads = args.shape.heads_kv;
    visit_float(args.q.dtype, [&]<typename T>(TypeTag<T>) {
      for_each_item(team, plan.documents * heads, plan.slots, [&](std::int64_t item, int slot) {
        backward_head<T>(args, bounds[item / heads], item % heads,
                         SlotScratch<Compute<T>>(plan, slots, slot));
      });
      zero_rows_from<T>(args.dq, bounds.q[plan.documents]);
      zero_rows_from<T>(args.dk, bounds.k[plan.documents]);
      zero_rows_from<T>(args.dv, bounds.k[plan.documents]);
    });
  });
}

}  // namespace tessera::cpu
