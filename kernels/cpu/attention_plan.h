// Scratch of attention on the CPU: the score blocks and converted panels of each thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/check.h"

namespace tessera::cpu {

struct AttentionPlan {
  std::int64_t keys = 0;      // most keys of a document
  std::int64_t documents = 0;
  std::int64_t head_dim = 0;
  bool converts = false;      // bf16 operands are converted to fp32 panels
  bool is_backward = false;
  std::size_t element = 4;
  int slots = 1;

  static constexpr std::int64_t kBlock = 64;  // queries handled at a time

  static AttentionPlan forward(const AttentionForward& args, int threads) {
    return of(args.q, args.k, args.cu_q, args.shape, threads, false);
  }
  static AttentionPlan backward(const AttentionBackward& args, int threads) {
    return of(args.q, args.k, args.cu_q, args.shape, threads, true);
  }

  // Elements of one thread's scratch, in this order.
  std::int64_t scores() const { return kBlock * keys; }             // [kBlock, keys]
  std::int64_t dscores() const { return is_backward ? scores() : 0; }
  std::int64_t key_panel() const { return converts ? keys * head_dim : 0; }  // k, and the same for v
  std::int64_t query_panel() const { return converts ? kBlock * head_dim : 0; }
  std::int64_t gradient_panel() const { return is_backward ? keys * head_dim : 0; }  // dk, dv
  std::int64_t slot_elements() const {
    // Query panels: q and out forward; q, dout, dq backward.
    return scores() + dscores() + 2 * key_panel() + (is_backward ? 3 : 2) * query_panel() +
           2 * gradient_panel();
  }
  // The table of first blocks per document comes before the slots.
  std::size_t table_bytes() const { return static_cast<std::size_t>(documents + 1) * sizeof(std::int64_t); }
  std::size_t slot_bytes() const {
    return (static_cast<std::size_t>(slot_elements()) * element + 63) / 64 * 64;
  }
  std::size_t bytes() const {
    return (table_bytes() + 63) / 64 * 64 + slot_bytes() * static_cast<std::size_t>(slots);
  }

 private:
  static AttentionPlan of(const Tensor& q, const Tensor& k, const Tensor& cu_q,
                          const AttentionShape& shape, int threads, bool is_backward) {
    AttentionPlan plan;
    plan.keys = std::min(shape.max_length > 0 ? shape.max_length : k.rows(), k.rows());
    plan.documents = cu_q.numel() - 1;
    plan.head_dim = shape.head_dim;
    plan.converts = q.dtype == DType::kBF16;
    plan.is_backward = is_backward;
    plan.element = size_of(compute_dtype(q.dtype));
    plan.slots = std::max(1, threads);
    return plan;
  }
};

}  // namespace tessera::cpu
