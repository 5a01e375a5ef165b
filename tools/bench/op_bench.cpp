#include "tools/bench/op_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "engine/core/error.h"
#include "kernels/ops.h"
#include "kernels/quantize.h"
#include "kernels/step_control.h"
#include "tools/bench/op_timer.h"

namespace tessera {
namespace {

struct Model {
  const char* name;
  std::int64_t tokens, sequence, hidden, ffn, heads_q, heads_kv, head_dim, vocab, block_parameters;
  std::int64_t qkv() const { return (heads_q + 2 * heads_kv) * head_dim; }
};
constexpr Model kModels[] = {
    {"1b", 16384, 4096, 2048, 8192, 32, 8, 64, 128256, 60'821'504},
    {"8b", 8192, 4096, 4096, 14336, 32, 8, 128, 128256, 218'112'000},
};

void bench_products(OpTimer& bench, const Model& m) {
  struct Linear {
    const char* name;
    std::int64_t out, in, tokens;
  };
  const std::int64_t chunk = 2048;
  const Linear linears[] = {{"qkv", m.qkv(), m.hidden, m.tokens},
                            {"attention_out", m.hidden, m.heads_q * m.head_dim, m.tokens},
                            {"gate_up", 2 * m.ffn, m.hidden, m.tokens},
                            {"down", m.hidden, m.ffn, m.tokens},
                            {"head", m.vocab, m.hidden, chunk}};
  for (const Linear& l : linears) {
    const double flops = 2.0 * static_cast<double>(l.tokens) * static_cast<double>(l.out) *
                         static_cast<double>(l.in);
    const double bytes =
        2.0 * static_cast<double>(l.tokens * l.in + l.out * l.in + l.tokens * l.out);
    const auto make = [&](const char* kind, DType out_type) {
      return [&bench, l, kind = std::string(kind), out_type] {
        Gemm g;
        const DType bf = DType::kBF16;
        if (kind == "forward") {
          g.a = bench.tensor(bf, Shape{l.tokens, l.in});
          g.b = bench.tensor(bf, Shape{l.out, l.in}, 0.02f);
          g.c = bench.tensor(out_type, Shape{l.tokens, l.out});
          g.transpose_b = true;
        } else if (kind == "dgrad") {
          g.a = bench.tensor(bf, Shape{l.tokens, l.out});
          g.b = bench.tensor(bf, Shape{l.out, l.in}, 0.02f);
          g.c = bench.tensor(out_type, Shape{l.tokens, l.in});
        } else {
          g.a = bench.tensor(bf, Shape{l.tokens, l.out});
          g.b = bench.tensor(bf, Shape{l.tokens, l.in});
          g.c = bench.tensor(out_type, Shape{l.out, l.in});
          g.transpose_a = true;
          g.accumulate = true;
        }
        return g;
      };
    };
    const std::string name = std::string("gemm ") + l.name;
    bench.time<Gemm>(name + " forward", gemm, make("forward", DType::kBF16), bytes, flops);
    bench.clear();
    bench.time<Gemm>(name + " dgrad", gemm, make("dgrad", DType::kBF16), bytes, flops);
    bench.clear();
    bench.time<Gemm>(name + " wgrad bf16", gemm, make("wgrad", DType::kBF16), bytes, flops);
    bench.clear();
    bench.time<Gemm>(name + " wgrad fp32", gemm, make("wgrad", DType::kF32), bytes, flops);
    bench.clear();
  }
}

// The same with scales of blocks: activations and gradients by 1 x 128, weights by 128 x 128.
void bench_fp8_blocks(OpTimer& bench, const Model& m) {
  const DType bf = DType::kBF16, fp = DType::kF32, e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2;
  const ScaleMode vector = ScaleMode::kVector, block = ScaleMode::kBlock;
  const auto product = [&](DType a, ScaleMode mode_b, DType c, std::int64_t rows, std::int64_t cols,
                           std::int64_t inner, bool accumulate) {
    Gemm g;
    g.a = bench.tensor(a, Shape{rows, inner});
    g.b = bench.tensor(e4m3, Shape{cols, inner});
    g.c = bench.tensor(c, Shape{rows, cols});
    g.transpose_b = true;
    g.accumulate = accumulate;
    g.scale_mode_a = vector;
    g.scale_mode_b = mode_b;
    g.scale_a = bench.tensor(fp, scale_shape(vector, rows, inner), 1e-3f);
    g.scale_b = bench.tensor(fp, scale_shape(mode_b, cols, inner), 1e-3f);
    return g;
  };
  struct Linear {
    const char* name;
    std::int64_t out, in;
  };
  for (const Linear& l :
       {Linear{"qkv", m.qkv(), m.hidden}, Linear{"attention_out", m.hidden, m.heads_q * m.head_dim},
        Linear{"gate_up", 2 * m.ffn, m.hidden}, Linear{"down", m.hidden, m.ffn}}) {
    const auto t = static_cast<double>(m.tokens), out = static_cast<double>(l.out),
               in = static_cast<double>(l.in);
    const double flops = 2 * t * out * in;
    const std::string name = std::string("gemm fp8 blockwise ") + l.name;
    bench.time<Gemm>(
        name + " forward", gemm,
        [&] { return product(e4m3, block, bf, m.tokens, l.out, l.in, false); },
        t * in + out * in + 2 * t * out, flops);
    bench.clear();
    for (const DType gradient : {e4m3, e5m2}) {
      const std::string format = gradient == e4m3 ? " e4m3" : " e5m2";
      bench.time<Gemm>(
          name + " dgrad" + format, gemm,
          [&] { return product(gradient, block, bf, m.tokens, l.in, l.out, false); },
          t * out + out * in + 2 * t * in, flops);
      bench.clear();
      for (const DType c : {bf, fp}) {
        bench.time<Gemm>(
            name + " wgrad" + format + (c == bf ? " bf16" : " fp32"), gemm,
            [&] { return product(gradient, vector, c, l.out, l.in, m.tokens, true); },
            t * out + t * in + (c == bf ? 4 : 8) * out * in, flops);
        bench.clear();
      }
    }
  }
  struct Cast {
    const char* name;
    std::int64_t rows, cols;
    DType format;
    ScaleMode mode;
    bool row, column;
  };
  for (const Cast& c :
       {Cast{"hidden row + column", m.tokens, m.hidden, e4m3, vector, true, true},
        Cast{"hidden row", m.tokens, m.hidden, e4m3, vector, true, false},
        Cast{"hidden column", m.tokens, m.hidden, e4m3, vector, false, true},
        Cast{"ffn row + column", m.tokens, m.ffn, e4m3, vector, true, true},
        Cast{"d gate_up row + column e5m2", m.tokens, 2 * m.ffn, e5m2, vector, true, true},
        Cast{"down weight row + column", m.hidden, m.ffn, e4m3, block, true, true}}) {
    const double bytes =
        static_cast<double>(c.rows * c.cols) *
        (2.0 + ((c.row ? 1 : 0) + (c.column ? 1 : 0)) * (c.mode == vector ? 1 + 1.0 / 32 : 1));
    bench.time<QuantizeBlocks>(
        std::string("quantize blocks ") + c.name, quantize_blocks,
        [&] {
          QuantizeBlocks a;
          a.mode = c.mode;
          a.in = bench.tensor(bf, Shape{c.rows, c.cols});
          if (c.row) {
            a.row = bench.tensor(c.format, Shape{c.rows, c.cols});
            a.row_scale = bench.tensor(fp, scale_shape(c.mode, c.rows, c.cols));
          }
          if (c.column) {
            a.column = bench.tensor(c.format, Shape{c.cols, c.rows});
            a.column_scale = bench.tensor(fp, scale_shape(c.mode, c.cols, c.rows));
          }
          return a;
        },
        bytes);
    bench.clear();
  }
}

// The products of FP8 training, and the passes that make their operands.
void bench_fp8(OpTimer& bench, const Model& m) {
  const DType bf = DType::kBF16, fp = DType::kF32, e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2;
  struct Linear {
    const char* name;
    std::int64_t out, in;
  };
  const Linear linears[] = {{"qkv", m.qkv(), m.hidden},
                            {"attention_out", m.hidden, m.heads_q * m.head_dim},
                            {"gate_up", 2 * m.ffn, m.hidden},
                            {"down", m.hidden, m.ffn}};
  const auto product = [&](DType a, DType c, std::int64_t rows, std::int64_t cols,
                           std::int64_t inner, bool accumulate, bool fast) {
    Gemm g;
    g.a = bench.tensor(a, Shape{rows, inner});
    g.b = bench.tensor(e4m3, Shape{cols, inner});
    g.c = bench.tensor(c, Shape{rows, cols});
    g.transpose_b = true;
    g.accumulate = accumulate;
    g.scale_a = bench.tensor(fp, Shape{4}, 1e-3f).flat_slice(0, 1);
    g.scale_b = bench.tensor(fp, Shape{4}, 1e-3f).flat_slice(0, 1);
    g.fast_accumulation = fast;
    return g;
  };
  for (const Linear& l : linears) {
    const auto t = static_cast<double>(m.tokens), out = static_cast<double>(l.out),
               in = static_cast<double>(l.in);
    const double flops = 2 * t * out * in;
    for (const bool fast : {true, false}) {
      const std::string name = std::string("gemm fp8 ") + l.name + (fast ? " fast" : " exact");
      bench.time<Gemm>(
          name + " forward", gemm,
          [&] { return product(e4m3, bf, m.tokens, l.out, l.in, false, fast); },
          t * in + out * in + 2 * t * out, flops);
      bench.clear();
      bench.time<Gemm>(
          name + " dgrad", gemm,
          [&] { return product(e5m2, bf, m.tokens, l.in, l.out, false, fast); },
          t * out + out * in + 2 * t * in, flops);
      bench.clear();
      bench.time<Gemm>(
          name + " wgrad bf16", gemm,
          [&] { return product(e5m2, bf, l.out, l.in, m.tokens, true, fast); },
          t * out + t * in + 4 * out * in, flops);
      bench.clear();
      bench.time<Gemm>(
          name + " wgrad fp32", gemm,
          [&] { return product(e5m2, fp, l.out, l.in, m.tokens, true, fast); },
          t * out + t * in + 8 * out * in, flops);
      bench.clear();
    }
  }
  const auto cast = [&](std::int64_t rows, std::int64_t cols, DType format, bool row, bool column) {
    Quantize a;
    a.in = bench.tensor(bf, Shape{rows, cols});
    a.amax = bench.upload(fp, std::vector<float>{5, 0, 0, 0}).flat_slice(0, 1);
    if (row) a.row = bench.tensor(format, Shape{rows, cols});
    if (column) a.column = bench.tensor(format, Shape{cols, rows});
    a.scale = bench.upload(fp, std::vector<float>(4)).flat_slice(0, 1);
    return a;
  };
  struct Cast {
    const char* name;
    std::int64_t rows, cols;
    DType format;
    bool row, column;
  };
  const Cast casts[] = {{"hidden row + column", m.tokens, m.hidden, e4m3, true, true},
                        {"hidden row", m.tokens, m.hidden, e4m3, true, false},
                        {"hidden column", m.tokens, m.hidden, e4m3, false, true},
                        {"ffn row + column", m.tokens, m.ffn, e4m3, true, true},
                        {"d qkv row + column e5m2", m.tokens, m.qkv(), e5m2, true, true},
                        {"d gate_up row + column e5m2", m.tokens, 2 * m.ffn, e5m2, true, true},
                        {"down weight row + column", m.hidden, m.ffn, e4m3, true, true}};
  for (const Cast& c : casts) {
    const double bytes =
        static_cast<double>(c.rows * c.cols) * (2.0 + (c.row ? 1 : 0) + (c.column ? 1 : 0));
    bench.time<Quantize>(
        std::string("quantize ") + c.name, quantize,
        [&] { return cast(c.rows, c.cols, c.format, c.row, c.column); }, bytes);
    bench.clear();
  }
  const auto hidden = static_cast<double>(m.tokens * m.hidden);
  bench.time<Transpose>(
      "transpose e4m3 hidden", transpose,
      [&] {
        return Transpose{bench.tensor(e4m3, Shape{m.tokens, m.hidden}),
                         bench.tensor(e4m3, Shape{m.hidden, m.tokens})};
      },
      2 * hidden);
  bench.clear();
  const auto record = [&] { return bench.upload(fp, std::vector<float>(4)).flat_slice(0, 1); };
  for (const auto& [name, cols] :
       {std::pair{"hidden", m.hidden}, {"qkv", m.qkv()}, {"gate_up", 2 * m.ffn}}) {
    bench.time<Amax>(
        std::string("amax ") + name, amax,
        [&, cols = cols] {
          return Amax{bench.tensor(bf, Shape{m.tokens, cols}), record()};
        },
        2.0 * static_cast<double>(m.tokens * cols));
    bench.clear();
  }
  // Producers that record the amax of what they write.
  const Shape rows{m.tokens, m.hidden};
  bench.time<RmsNormForward>(
      "rmsnorm_forward residual amax", rmsnorm_forward,
      [&] {
        RmsNormForward a;
        a.x = bench.tensor(bf, rows);
        a.delta = bench.tensor(bf, rows);
        a.weight = bench.tensor(bf, Shape{m.hidden});
        a.sum = bench.tensor(bf, rows);
        a.out = bench.tensor(bf, rows);
        a.rstd = bench.tensor(fp, Shape{m.tokens});
        a.amax = record();
        return a;
      },
      8 * hidden);
  bench.clear();
  bench.time<RmsNormBackward>(
      "rmsnorm_backward residual amax", rmsnorm_backward,
      [&] {
        RmsNormBackward a;
        a.dout = bench.tensor(bf, rows);
        a.s = bench.tensor(bf, rows);
        a.weight = bench.tensor(bf, Shape{m.hidden});
        a.rstd = bench.tensor(fp, Shape{m.tokens});
        a.dsum = bench.tensor(bf, rows);
        a.dx = bench.tensor(bf, rows);
        a.dweight = bench.tensor(fp, Shape{m.hidden});
        a.accumulate_dweight = true;
        a.amax = record();
        return a;
      },
      8 * hidden);
  bench.clear();
  const auto ffn = static_cast<double>(m.tokens * m.ffn);
  bench.time<SwiGluForward>(
      "swiglu_forward amax", swiglu_forward,
      [&] {
        return SwiGluForward{bench.tensor(bf, Shape{m.tokens, 2 * m.ffn}),
                             bench.tensor(bf, Shape{m.tokens, m.ffn}), record()};
      },
      6 * ffn);
  bench.clear();
  bench.time<SwiGluBackward>(
      "swiglu_backward amax", swiglu_backward,
      [&] {
        return SwiGluBackward{bench.tensor(bf, Shape{m.tokens, m.ffn}),
                              bench.tensor(bf, Shape{m.tokens, 2 * m.ffn}),
                              bench.tensor(bf, Shape{m.tokens, 2 * m.ffn}), record()};
      },
      10 * ffn);
  bench.clear();
}

void bench_block(OpTimer& bench, const Model& m) {
  const DType bf = DType::kBF16, fp = DType::kF32;
  const Shape rows{m.tokens, m.hidden};
  const double row_bytes = 2.0 * static_cast<double>(m.tokens * m.hidden);
  bench.time<RmsNormForward>(
      "rmsnorm_forward residual", rmsnorm_forward,
      [&] {
        RmsNormForward a;
        a.x = bench.tensor(bf, rows);
        a.delta = bench.tensor(bf, rows);
        a.weight = bench.tensor(bf, Shape{m.hidden});
        a.sum = bench.tensor(bf, rows);
        a.out = bench.tensor(bf, rows);
        a.rstd = bench.tensor(fp, Shape{m.tokens});
        return a;
      },
      4 * row_bytes);
  bench.clear();
  bench.time<RmsNormBackward>(
      "rmsnorm_backward residual", rmsnorm_backward,
      [&] {
        RmsNormBackward a;
        a.dout = bench.tensor(bf, rows);
        a.s = bench.tensor(bf, rows);
        a.weight = bench.tensor(bf, Shape{m.hidden});
        a.rstd = bench.tensor(fp, Shape{m.tokens});
        a.dsum = bench.tensor(bf, rows);
        a.dx = bench.tensor(bf, rows);
        a.dweight = bench.tensor(fp, Shape{m.hidden});
        a.accumulate_dweight = true;
        return a;
      },
      4 * row_bytes);
  bench.clear();
  const QkvLayout layout{m.heads_q, m.heads_kv, m.head_dim};
  std::vector<std::int32_t> positions;
  for (std::int64_t t = 0; t < m.tokens; ++t)
    positions.push_back(static_cast<std::int32_t>(t % m.sequence));
  const double rotated_bytes =
      2.0 * static_cast<double>(m.tokens * (layout.q_cols() + layout.kv_cols()));
  for (const bool norm : {false, true}) {
    const std::string suffix = norm ? " qk-norm" : "";
    const double qkv_bytes = 2.0 * static_cast<double>(m.tokens * layout.cols());
    bench.time<QkvRopeForward>(
        "qkv_rope_forward" + suffix, qkv_rope_forward,
        [&] {
          QkvRopeForward a;
          a.in = bench.tensor(bf, Shape{m.tokens, layout.cols()});
          a.out = norm ? bench.tensor(bf, a.in.shape) : a.in;
          a.cos = bench.tensor(fp, Shape{m.sequence, m.head_dim / 2});
          a.sin = bench.tensor(fp, a.cos.shape);
          a.positions = bench.upload(DType::kI32, positions);
          a.layout = layout;
          if (norm) {
            a.q_norm = bench.tensor(bf, Shape{m.head_dim});
            a.k_norm = bench.tensor(bf, Shape{m.head_dim});
            a.rstd = bench.tensor(fp, Shape{m.tokens, m.heads_q + m.heads_kv});
          }
          return a;
        },
        2 * (norm ? qkv_bytes : rotated_bytes));
    bench.clear();
    bench.time<QkvRopeBackward>(
        "qkv_rope_backward" + suffix, qkv_rope_backward,
        [&] {
          QkvRopeBackward a;
          a.d = bench.tensor(bf, Shape{m.tokens, layout.cols()});
          a.cos = bench.tensor(fp, Shape{m.sequence, m.head_dim / 2});
          a.sin = bench.tensor(fp, a.cos.shape);
          a.positions = bench.upload(DType::kI32, positions);
          a.layout = layout;
          if (norm) {
            a.in = bench.tensor(bf, a.d.shape);
            a.q_norm = bench.tensor(bf, Shape{m.head_dim});
            a.k_norm = bench.tensor(bf, Shape{m.head_dim});
            a.rstd = bench.tensor(fp, Shape{m.tokens, m.heads_q + m.heads_kv});
            a.dq_norm = bench.tensor(fp, Shape{m.head_dim});
            a.dk_norm = bench.tensor(fp, Shape{m.head_dim});
          }
          return a;
        },
        (norm ? 3 : 2) * rotated_bytes);
    bench.clear();
  }
  const double ffn_bytes = 2.0 * static_cast<double>(m.tokens * m.ffn);
  bench.time<SwiGluForward>(
      "swiglu_forward", swiglu_forward,
      [&] {
        return SwiGluForward{bench.tensor(bf, Shape{m.tokens, 2 * m.ffn}),
                             bench.tensor(bf, Shape{m.tokens, m.ffn})};
      },
      3 * ffn_bytes);
  bench.clear();
  bench.time<SwiGluBackward>(
      "swiglu_backward", swiglu_backward,
      [&] {
        return SwiGluBackward{bench.tensor(bf, Shape{m.tokens, m.ffn}),
                              bench.tensor(bf, Shape{m.tokens, 2 * m.ffn}),
                              bench.tensor(bf, Shape{m.tokens, 2 * m.ffn})};
      },
      5 * ffn_bytes);
  bench.clear();
  bench.time<Add>(
      "add bf16", add,
      [&] {
        return Add{bench.tensor(bf, rows), bench.tensor(bf, rows), bench.tensor(bf, rows)};
      },
      3 * row_bytes);
  bench.clear();
  bench.time<Add>(
      "add fp32 += bf16", add,
      [&] {
        const Tensor sum = bench.tensor(fp, rows);
        return Add{sum, bench.tensor(bf, rows), sum};
      },
      5 * row_bytes);
  bench.clear();
  bench.time<Scale>(
      "scale bf16 -> e4m3", scale,
      [&] {
        return Scale{bench.tensor(bf, rows), bench.tensor(DType::kF8E4M3, rows), 100.0};
      },
      1.5 * row_bytes);
  bench.clear();
  bench.time<Scale>(
      "scale fp32 -> bf16", scale,
      [&] {
        return Scale{bench.tensor(fp, rows), bench.tensor(bf, rows), 1.0};
      },
      3 * row_bytes);
  bench.clear();
  bench.time<ColumnSum>(
      "column_sum", column_sum,
      [&] {
        return ColumnSum{bench.tensor(bf, Shape{m.tokens, m.qkv()}),
                         bench.tensor(fp, Shape{m.qkv()}), true};
      },
      2.0 * static_cast<double>(m.tokens * m.qkv()));
  bench.clear();
  for (const int count : {2, 8}) {
    const std::int64_t n = 16 << 20;
    bench.time<SumParts>(
        "sum_parts bf16 x " + std::to_string(count), sum_parts,
        [&] {
          return SumParts{bench.tensor(bf, Shape{count * n}), bench.tensor(bf, Shape{n}), count,
                          false};
        },
        2.0 * static_cast<double>((count + 1) * n));
    bench.clear();
  }
}

void bench_attention(OpTimer& bench, const Model& m, std::int64_t documents,
                     std::int64_t max_documents, const std::string& label) {
  const DType bf = DType::kBF16;
  const QkvLayout layout{m.heads_q, m.heads_kv, m.head_dim};
  const std::int64_t length = m.tokens / documents;
  std::vector<std::int32_t> bounds{0};
  for (std::int64_t d = 0; d < max_documents; ++d) {
    bounds.push_back(static_cast<std::int32_t>(std::min(m.tokens, (d + 1) * length)));
  }
  const double tokens = static_cast<double>(m.tokens);
  // Two products over half of each document's square.
  const double flops = 2.0 * tokens * static_cast<double>(length * m.heads_q * m.head_dim);
  const double bytes = 2.0 * tokens * static_cast<double>(layout.cols() + layout.q_cols());
  const AttentionShape shape{
      m.heads_q, m.heads_kv, m.head_dim,
      0,         length,     static_cast<float>(1 / std::sqrt(static_cast<double>(m.head_dim)))};
  const auto forward = [&] {
    AttentionForward a;
    const Tensor qkv = bench.tensor(bf, Shape{m.tokens, layout.cols()});
    a.q = qkv.col_slice(0, layout.q_cols());
    a.k = qkv.col_slice(layout.q_cols(), layout.kv_cols());
    a.v = qkv.col_slice(layout.q_cols() + layout.kv_cols(), layout.kv_cols());
    a.out = bench.tensor(bf, Shape{m.tokens, layout.q_cols()});
    a.lse = bench.tensor(DType::kF32, Shape{m.tokens, m.heads_q});
    a.cu_q = bench.upload(DType::kI32, bounds);
    a.cu_k = a.cu_q;
    a.shape = shape;
    return a;
  };
  bench.time<AttentionForward>("attention_forward " + label, attention_forward, forward, bytes,
                               flops);
  bench.clear();
  for (const bool deterministic : {true, false}) {
    bench.time<AttentionBackward>(
        "attention_backward " + label + (deterministic ? "" : " free order"), attention_backward,
        [&] {
          const AttentionForward f = forward();
          {
            ScratchStack scratch(bench.stream(),
                                 workspace(f, bench.stream().context().capabilities()) + 4096);
            attention_forward(f, bench.stream());
            bench.stream().synchronize();
          }
          AttentionBackward a;
          a.q = f.q, a.k = f.k, a.v = f.v, a.out = f.out, a.lse = f.lse, a.cu_q = f.cu_q,
          a.cu_k = f.cu_k;
          a.dout = bench.tensor(bf, f.out.shape);
          const Tensor d = bench.tensor(bf, Shape{m.tokens, layout.cols()});
          a.dq = d.col_slice(0, layout.q_cols());
          a.dk = d.col_slice(layout.q_cols(), layout.kv_cols());
          a.dv = d.col_slice(layout.q_cols() + layout.kv_cols(), layout.kv_cols());
          a.shape = shape;
          a.deterministic = deterministic;
          return a;
        },
        2 * bytes, 2.5 * flops);
    bench.clear();
  }
}

void bench_head(OpTimer& bench, const Model& m) {
  const DType bf = DType::kBF16, fp = DType::kF32;
  const std::int64_t chunk = 2048;
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < chunk; ++t)
    targets.push_back(static_cast<std::int32_t>((t * 7919) % m.vocab));
  const double bytes = 2.0 * static_cast<double>(chunk * m.vocab);
  bench.time<CrossEntropyStats>(
      "cross_entropy_stats", cross_entropy_stats,
      [&] {
        CrossEntropyStats a;
        a.logits = bench.tensor(bf, Shape{chunk, m.vocab});
        a.targets = bench.upload(DType::kI32, targets);
        a.stats = bench.tensor(fp, Shape{chunk, 3});
        a.valid_cols = m.vocab;
        return a;
      },
      bytes);
  bench.clear();
  bench.time<CrossEntropyCombine>(
      "cross_entropy_combine (latency)", cross_entropy_combine,
      [&] {
        CrossEntropyCombine a;
        a.stats = bench.tensor(fp, Shape{1, chunk, 3});
        a.targets = bench.upload(DType::kI32, targets);
        a.lse = bench.tensor(fp, Shape{chunk});
        a.loss_sum = bench.tensor(DType::kF64, Shape{1});
        return a;
      },
      16.0 * static_cast<double>(chunk));
  bench.clear();
  bench.time<CrossEntropyBackward>(
      "cross_entropy_backward", cross_entropy_backward,
      [&] {
        CrossEntropyBackward a;
        a.logits = bench.tensor(bf, Shape{chunk, m.vocab});
        a.targets = bench.upload(DType::kI32, targets);
        a.lse = bench.tensor(fp, Shape{chunk});
        a.valid_cols = m.vocab;
        return a;
      },
      2 * bytes);
  bench.clear();
  std::vector<std::int32_t> tokens, order(static_cast<std::size_t>(m.tokens));
  for (std::int64_t t = 0; t < m.tokens; ++t) {
    // About the skew of text: a few tokens take a large share.
    const double u = static_cast<double>((t * 2654435761u) % 100003) / 100003.0;
    tokens.push_back(
        static_cast<std::int32_t>(std::pow(u, 6.0) * static_cast<double>(m.vocab - 1)));
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return tokens[static_cast<std::size_t>(a)] < tokens[static_cast<std::size_t>(b)];
  });
  const double row_bytes = 2.0 * static_cast<double>(m.tokens * m.hidden);
  bench.time<EmbeddingForward>(
      "embedding_forward", embedding_forward,
      [&] {
        EmbeddingForward a;
        a.tokens = bench.upload(DType::kI32, tokens);
        a.weight = bench.tensor(bf, Shape{m.vocab, m.hidden});
        a.out = bench.tensor(bf, Shape{m.tokens, m.hidden});
        return a;
      },
      2 * row_bytes);
  bench.clear();
  bench.time<EmbeddingBackward>(
      "embedding_backward accumulate", embedding_backward,
      [&] {
        EmbeddingBackward a;
        a.tokens = bench.upload(DType::kI32, tokens);
        a.order = bench.upload(DType::kI32, order);
        a.dout = bench.tensor(bf, Shape{m.tokens, m.hidden});
        a.dweight = bench.tensor(bf, Shape{m.vocab, m.hidden});
        a.accumulate = true;
        return a;
      },
      row_bytes);
  bench.clear();
}

void bench_optimizer(OpTimer& bench, const Model& m) {
  const DType bf = DType::kBF16, fp = DType::kF32;
  const std::int64_t n = m.block_parameters;
  std::vector<ShardSegment> segments;
  for (int i = 0; i < 8; ++i) {
    ShardSegment s;
    s.begin = n / 8 * i;
    s.end = i == 7 ? n : n / 8 * (i + 1);
    s.local_cols = m.hidden;
    s.global_cols = m.hidden;
    s.weight_decay = 0.1f;
    s.stream = i;
    segments.push_back(s);
  }
  StepControl control;
  control.step = 3;
  control.adam_step = 3;
  control.learning_rate = 1e-4f;
  control.grad_scale = 1e-3f;
  control.is_finite = 1;
  control.has_targets = 1;
  struct Variant {
    const char* name;
    DType state, grad;
    bool master;
    double bytes;
  };
  const Variant variants[] = {{"adamw bf16 states, bf16 grad", bf, bf, false, 14},
                              {"adamw fp32 master+states, bf16 grad", fp, bf, true, 28},
                              {"adamw fp32 master+states, fp32 grad", fp, fp, true, 30}};
  for (const Variant& v : variants) {
    bench.time<AdamW>(
        v.name, adamw,
        [&] {
          AdamW a;
          a.weight = bench.tensor(bf, Shape{n}, 0.02f);
          if (v.master) a.master = bench.tensor(fp, Shape{n}, 0.02f);
          a.grad = bench.tensor(v.grad, Shape{n});
          a.m = bench.tensor(v.state, Shape{n}, 0.01f);
          a.v = bench.tensor(v.state, Shape{n}, 0.0f);
          a.segments = bench.upload(DType::kU8, segments);
          a.control = bench.upload(DType::kU8, std::vector<StepControl>{control});
          return a;
        },
        v.bytes * static_cast<double>(n));
    bench.clear();
  }
  for (const DType grad : {bf, fp}) {
    bench.time<SumOfSquares>(
        "sum_of_squares " + std::string(name_of(grad)), sum_of_squares,
        [&] {
          SumOfSquares a;
          a.grad = bench.tensor(grad, Shape{n});
          a.segments = bench.upload(DType::kU8, segments);
          a.sum = bench.tensor(DType::kF64, Shape{1});
          return a;
        },
        static_cast<double>(size_of(grad)) * static_cast<double>(n));
    bench.clear();
  }
}

}  // namespace

void bench_ops(const std::string& model, const std::string& filter, bool autotune) {
  CHECK_USER(cuda_device_count() > 0, "[bench] ops are timed on a GPU, and none can be used here");
  const Model* chosen = nullptr;
  for (const Model& m : kModels) chosen = model == m.name ? &m : chosen;
  CHECK_USER(chosen != nullptr, "[bench] {} is no model of the list; use 1b or 8b", model);
  ContextOptions options;
  options.autotune_gemm = autotune;
  const Model& m = *chosen;
  fmt::print("== {}: {} tokens\n", m.name, m.tokens);
  OpTimer bench(options, filter);
  bench_products(bench, m);
  if (bench.stream().context().capabilities().sm_arch >= 89) bench_fp8(bench, m);
  if (bench.stream().context().capabilities().sm_arch == 90) bench_fp8_blocks(bench, m);
  bench_attention(bench, m, m.tokens / m.sequence, m.tokens / m.sequence, "rows");
  bench_attention(bench, m, m.tokens / 1024, 4 * m.tokens / 1024, "packed 1k");
  bench_block(bench, m);
  bench_head(bench, m);
  bench_optimizer(bench, m);
  bench.print();
}

}  // namespace tessera
