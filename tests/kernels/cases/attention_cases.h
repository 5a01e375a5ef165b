// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct AttentionCase {
  std::string tag;
  std::vector<std::int32_t> queries, keys;  // per document
  std::int64_t heads_q, heads_kv, head_dim;
  std::int64_t window = 0;
  std::int64_t extra_rows = 0;  // past the last document
  std::int64_t gap = 0;
};

struct AttentionReference {
  Values out, lse, dq, dk, dv;                           // true values
  Values out_mag, dq_mag, dk_mag, dv_mag;                // sums of magnitudes of their terms
  Values lse_mag;
};

inline std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> bounds{0};
  for (const std::int32_t n : lengths) bounds.push_back(bounds.back() + n);
  return bounds;
}

// The definition, query by query and key by key.
inline AttentionReference attention_reference(const AttentionCase& c, std::int64_t q_rows,
                                              std::int64_t k_rows, double scale, const Values& q,
                                              const Values& k, const Values& v, const Values& dout) {
  const std::int64_t hd = c.head_dim, q_cols = c.heads_q * hd, k_cols = c.heads_kv * hd;
  const auto zeros = [](std::int64_t n) { return Values(static_cast<std::size_t>(n), 0.0); };
  AttentionReference r;
  for (Values* x : {&r.out, &r.out_mag, &r.dq, &r.dq_mag}) *x = zeros(q_rows * q_cols);
  for (Values* x : {&r.dk, &r.dk_mag, &r.dv, &r.dv_mag}) *x = zeros(k_rows * k_cols);
  r.lse = zeros(q_rows * c.heads_q);
  r.lse_mag = r.lse;
  const std::vector<std::int32_t> cu_q = cumulative(c.queries), cu_k = cumulative(c.keys);
  for (std::size_t d = 0; d < c.queries.size(); ++d) {
    for (std::int64_t i = 0; i < c.queries[d]; ++i) {
      const std::int64_t position = c.keys[d] - c.queries[d] + i;
      const std::int64_t begin = c.window > 0 ? std::max<std::int64_t>(0, position - c.window + 1) : 0;
      for (std::int64_t h = 0; h < c.heads_q; ++h) {
        const std::int64_t kh = h / (c.heads_q / c.heads_kv), count = position + 1 - begin;
        const std::int64_t q_at = (cu_q[d] + i) * q_cols + h * hd;
        const auto key_at = [&](std::int64_t j) { return (cu_k[d] + begin + j) * k_cols + kh * hd; };
        const double* qi = q.data() + q_at;
        const double* di = dout.data() + q_at;
        Values p(static_cast<std::size_t>(count)), dp(p.size()), s_mag(p.size()), dp_mag(p.size());
        double top = -INFINITY;
        for (std::int64_t j = 0; j < count; ++j) {
          for (std::int64_t e = 0; e < hd; ++e) {
            const double kv = k[static_cast<std::size_t>(key_at(j) + e)], vv = v[static_cast<std::size_t>(key_at(j) + e)];
            p[static_cast<std::size_t>(j)] += scale * qi[e] * kv;
            s_mag[static_cast<std::size_t>(j)] += std::abs(scale * qi[e] * kv);
            dp[static_cast<std::size_t>(j)] += di[e] * vv;
            dp_mag[static_cast<std::size_t>(j)] += std::abs(di[e] * vv);
          }
          top = std::max(top, p[static_cast<std::size_t>(j)]);
        }
        double sum = 0, worst_score = 0;
        for (std::int64_t j = 0; j < count; ++j) {
          p[static_cast<std::size_t>(j)] = std::exp(p[static_cast<std::size_t>(j)] - top);
          sum += p[static_cast<std::size_t>(j)];
          worst_score = std::max(worst_score, s_mag[static_cast<std::size_t>(j)]);
        }
        r.lse[static_cast<std::size_t>((cu_q[d] + i) * c.heads_q + h)] = top + std::log(sum);
        r.lse_mag[static_cast<std::size_t>((cu_q[d] + i) * c.heads_q + h)] = worst_score + std::abs(top) + 2;
        // An error e of a score changes its probability by e p: `spread` carries it into every product.
        const double spread = 2 + 2 * worst_score;
        double delta = 0, delta_mag = 0;
        for (std::int64_t j = 0; j < count; ++j) {
          p[static_cast<std::size_t>(j)] /= sum;
          delta += p[static_cast<std::size_t>(j)] * dp[static_cast<std::size_t>(j)];
          delta_mag += p[static_cast<std::size_t>(j)] * dp_mag[static_cast<std::size_t>(j)];
        }
        for (std::int64_t j = 0; j < count; ++j) {
          const double pj = p[static_cast<std::size_t>(j)];
          const double ds = scale * pj * (dp[static_cast<std::size_t>(j)] - delta);
          const double ds_mag = scale * pj * spread * (dp_mag[static_cast<std::size_t>(j)] + delta_mag);
          for (std::int64_t e = 0; e < hd; ++e) {
            const auto at_q = static_cast<std::size_t>(q_at + e), at_k = static_cast<std::size_t>(key_at(j) + e);
            r.out[at_q] += pj * v[at_k];
            r.out_mag[at_q] += pj * spread * std::abs(v[at_k]);
            r.dq[at_q] += ds * k[at_k];
            r.dq_mag[at_q] += ds_mag * std::abs(k[at_k]);
            r.dk[at_k] += ds * q[at_q];
            r.dk_mag[at_k] += ds_mag * std::abs(q[at_q]);
            r.dv[at_k] += pj * dout[at_q];
            r.dv_mag[at_k] += pj * spread * std::abs(dout[at_q]);
          }
        }
      }
    }
  }
  return r;
}

inline std::vector<OpOutput> run_attention(OpFixture& f, DType dtype, const AttentionCase& c) {
  const std::vector<std::int32_t> cu_q = cumulative(c.queries), cu_k = cumulative(c.keys);
  const std::int64_t q_rows = cu_q.back() + c.extra_rows, k_rows = cu_k.back() + c.extra_rows;
  const std::int64_t q_cols = c.heads_q * c.head_dim, k_cols = c.heads_kv * c.head_dim;
  const Values q = rounded(normal_values(q_rows * q_cols, 1, 1.5), dtype);
  const Values k = rounded(normal_values(k_rows * k_cols, 2, 1.5), dtype);
  const Values v = rounded(normal_values(k_rows * k_cols, 3), dtype);
  const Values dout = rounded(normal_values(q_rows * q_cols, 4), dtype);
  AttentionForward forward;
  forward.shape = {c.heads_q, c.heads_kv, c.head_dim, c.window,
                   std::max<std::int64_t>(1, *std::max_element(c.keys.begin(), c.keys.end())),
                   static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)))};
  forward.q = f.input(q, dtype, Shape{q_rows, q_cols}, c.gap);
  forward.k = f.input(k, dtype, Shape{k_rows, k_cols}, c.gap);
  forward.v = f.input(v, dtype, Shape{k_rows, k_cols}, 2 * c.gap);
  forward.out = f.output(dtype, Shape{q_rows, q_cols}, c.gap);
  const DType statistics = statistics_type(dtype);
  forward.lse = f.output(statistics, Shape{q_rows, c.heads_q});
  forward.cu_q = f.integers(cu_q);
  forward.cu_k = f.integers(cu_k);
  f.run(attention_forward, forward);
  AttentionBackward backward;
  backward.dout = f.input(dout, dtype, Shape{q_rows, q_cols}, c.gap);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.dq = f.output(dtype, Shape{q_rows, q_cols}, c.gap);
  backward.dk = f.output(dtype, Shape{k_rows, k_cols}, c.gap);
  backward.dv = f.output(dtype, Shape{k_rows, k_cols}, c.gap);
  backward.cu_q = forward.cu_q;
  backward.cu_k = forward.cu_k;
  backward.shape = forward.shape;
  f.run(attention_backward, backward);

  const AttentionReference r = attention_reference(c, q_rows, k_rows, static_cast<double>(forward.shape.scale),
                                                   q, k, v, dout);
  const double stored = epsilon_of(dtype) / 2, u = epsilon_of(statistics) / 2;
  // GPUs multiply bf16 probabilities, the CPU keeps them in fp32. The backward reads `out` as stored, so
  // delta carries its rounding everywhere.
  const double forward_u = f.is_cpu() ? u : std::max(u, stored);
  const double backward_u = std::max(u, stored);
  const double k_forward = 2 * std::sqrt(static_cast<double>(c.head_dim + forward.shape.max_length) + 16);
  const auto output = [&](std::string name, const Tensor& t, const Values& want, const Values& magnitude,
                          double inner, double terms) {
    OpOutput out{std::move(name), f.values(t), want, {}};
    for (std::size_t i = 0; i < want.size(); ++i) {
      // Rows past the last document are exactly 0 and have magnitude 0.
      out.bound.push_back(magnitude[i] == 0 ? 0 : stored * std::abs(want[i]) * (1 + 1e-6) +
                                                      terms * inner * magnitude[i] + Bound::tiny());
    }
    return out;
  };
  // Rounded independently, bf16 terms add up like the root of their number; 3 is the tail of that sum.
  const double forward_terms = forward_u > u ? 3 : k_forward, backward_terms = backward_u > u ? 3 : k_forward;
  std::vector<OpOutput> outputs{
      output("out", forward.out, r.out, r.out_mag, forward_u, forward_terms),
      output("dq", backward.dq, r.dq, r.dq_mag, backward_u, backward_terms),
      output("dk", backward.dk, r.dk, r.dk_mag, backward_u, backward_terms),
      output("dv", backward.dv, r.dv, r.dv_mag, f.is_cpu() ? u : backward_u,
             f.is_cpu() ? 4 * k_forward : backward_terms)};
  if (cu_q.back() > 0) {
    OpOutput lse{"lse", f.values(forward.lse.row_slice(0, cu_q.back())), {}, {}};
    for (std::size_t i = 0; i < lse.got.size(); ++i) {
      lse.want.push_back(r.lse[i]);
      lse.bound.push_back(k_forward * u * r.lse_mag[i]);
    }
    outputs.push_back(lse);
  }
  return outputs;
}

inline void add_attention_cases(std::vector<OpCase>& cases) {
  const std::vector<AttentionCase> list{
      {"one_token", {1}, {1}, 1, 1, 2},
      {"odd", {37}, {37}, 2, 2, 7},
      {"blocks", {131}, {131}, 2, 1, 16, 0, 0, 3},
      {"packed", {5, 70, 1, 0, 64, 0}, {5, 70, 1, 0, 64, 0}, 6, 2, 8, 0, 9},
      {"window", {150, 20}, {150, 20}, 2, 1, 16, 13, 2},
      {"window_one", {67}, {67}, 2, 2, 8, 1},
      {"decode", {1, 1, 1, 0}, {90, 1, 37, 0}, 4, 2, 16},
      {"decode_window", {1, 3}, {90, 70}, 2, 1, 8, 17},
      {"chunk", {40, 66}, {100, 200}, 2, 1, 16, 0, 4, 8},
      {"keys_without_queries", {0, 5}, {9, 12}, 2, 1, 8},
      {"nothing", {0, 0}, {0, 0}, 2, 1, 8, 0, 3},
      {"head64", {65, 30}, {65, 30}, 4, 2, 64},
  };
  for (const DType dtype : float_types()) {
    for (const AttentionCase& c : list) {
      cases.push_back({"attention_" + dtype_tag(dtype) + "_" + c.tag, dtype,
                       [=](OpFixture& f) { return run_attention(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
