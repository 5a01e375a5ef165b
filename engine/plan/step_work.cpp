#include "engine/plan/step_work.h"

#include <map>
#include <tuple>

#include "models/block.h"

namespace tessera {
namespace {

// One linear layer of a block as a rank computes it.
struct Linear {
  const char* name;    // "qkv"
  const char* module;  // as keep_bf16 names it, below the layer; the first of fused ones
  std::int64_t out = 0, in = 0;
  bool is_recomputed = false;  // by a full recompute
};

class Counter {
 public:
  Counter(const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& options,
          std::int64_t micro_batches)
      : model_(model),
        options_(options),
        tokens_(options.geometry.tokens),
        local_tokens_(static_cast<double>(options.geometry.local_tokens)),
        times_(micro_batches),
        element_(static_cast<double>(size_of(options.params.compute))),
        layout_(local_qkv_layout(model, mesh.tensor)),
        ffn_(local_intermediate_size(model, mesh.tensor)),
        vocab_((model.vocab_size + mesh.tensor - 1) / mesh.tensor),
        linears_{{"qkv", "self_attn.q_proj", layout_.cols(), model.hidden_size, true},
                 {"attention out", "self_attn.o_proj", model.hidden_size, layout_.q_cols(), true},
                 {"gate_up", "mlp.gate_proj", 2 * ffn_, model.hidden_size, true},
                 {"down", "mlp.down_proj", model.hidden_size, ffn_, false}} {}

  void add_block(int layer) {
    const double h = local_tokens_ * static_cast<double>(model_.hidden_size) * element_;
    const double t = static_cast<double>(tokens_) * element_;
    const bool full = options_.recompute == Recompute::kFull;
    const bool again = options_.recompute != Recompute::kNone;
    for (const Linear& linear : linears_) add_linear(linear, layer);

    // The first block of a model has nothing to add to the residual stream.
    pass("rmsnorm_forward", (layer == 0 ? 2 : 4) * h + 4 * h + (again ? 4 * h : 0));
    pass("rmsnorm_backward", 2 * 4 * h);
    const double rotated = static_cast<double>(layout_.q_cols() + layout_.kv_cols());
    const double rope =
        model_.qk_norm ? 2 * t * static_cast<double>(layout_.cols()) : 2 * t * rotated;
    pass("rope_forward", rope * (full ? 2 : 1));
    pass("rope_backward", model_.qk_norm ? 3 * t * rotated : rope);
    const double ffn = t * static_cast<double>(ffn_);
    pass("swiglu_forward", 3 * ffn * (again ? 2 : 1));
    pass("swiglu_backward", 5 * ffn);
    if (model_.attention_qkv_bias) pass("column_sum", t * static_cast<double>(layout_.cols()));
    if (model_.attention_o_bias) pass("column_sum", h);
    if (model_.mlp_bias) pass("column_sum", 2 * ffn + h);

    // Two products over half of the square, two operations a product and element.
    std::int64_t keys = options_.geometry.max_length;
    const std::int64_t window = model_.sliding_window(layer);
    double half = static_cast<double>(keys) / 2;
    if (window > 0 && window < keys) {
      half = static_cast<double>(window) *
             (1 - static_cast<double>(window) / (2 * static_cast<double>(keys)));
    }
    const double forward = 4 * static_cast<double>(tokens_) * half *
                           static_cast<double>(layout_.q_cols()) * static_cast<double>(times_);
    work_.attention_forward_flops += forward * (full ? 2 : 1);
    work_.attention_backward_flops += 2.5 * forward;
    for (const Linear& linear : linears_)
      parameters_ += static_cast<double>(linear.out * linear.in);
    parameters_ += 2 * static_cast<double>(model_.hidden_size);
  }

  void add_embedding() {
    const double row = static_cast<double>(tokens_ * model_.hidden_size) * element_;
    pass("embedding_forward", 2 * row);
    pass("embedding_backward", row);
    parameters_ += static_cast<double>(vocab_ * model_.hidden_size);
  }

  void add_head(bool has_own_matrix) {
    const double h = local_tokens_ * static_cast<double>(model_.hidden_size) * element_;
    pass("rmsnorm_forward", 4 * h);
    pass("rmsnorm_backward", 3 * h);
    // Loss and gradient of the logits in place: read once, written once.
    pass("cross_entropy", 2 * static_cast<double>(tokens_ * vocab_) * element_);
    const Linear head{"head", "", vocab_, model_.hidden_size, false};
    add_products(head, false);
    if (has_own_matrix) parameters_ += static_cast<double>(vocab_ * model_.hidden_size);
    parameters_ += static_cast<double>(model_.hidden_size);
  }

  StepWork finish(const MeshShape& mesh) {
    const ParamStoreOptions& params = options_.params;
    const double owned = parameters_ / (params.zero > 0 ? mesh.shard_size() : 1);
    const double gradient = static_cast<double>(size_of(params.gradients));
    const double moments = 2 * 2 * static_cast<double>(size_of(params.moments));
    const double weights = params.fp32_masters ? 2 * 4 + element_ : 2 * element_;
    // The norm reads every gradient before any may be applied.
    work_.optimizer_bytes = owned * (2 * gradient + moments + weights);
    for (auto& [key, product] : products_) work_.products.push_back(product);
    for (const auto& [op, bytes] : passes_) work_.passes.push_back({op, bytes});
    return std::move(work_);
  }

 private:
  bool is_fp8(const Linear& linear, int layer) const {
    if (!options_.recipe.is_quantized() || linear.out % 16 != 0 || linear.in % 16 != 0)
      return false;
    const std::string name = "model.layers." + std::to_string(layer) + "." + linear.module;
    for (const std::string& entry : options_.recipe.keep_bf16) {
      if (names_layer(entry, name)) return false;
    }
    return true;
  }

  void add_linear(const Linear& linear, int layer) {
    const bool fp8 = is_fp8(linear, layer);
    add_products(linear, fp8);
    if (!fp8) return;
    // A cast reads the values and writes a copy along rows and one along columns.
    const double cast = (element_ + 2) * static_cast<double>(times_);
    const double inputs = static_cast<double>(tokens_ * linear.in) * cast;
    const double gradients = static_cast<double>(tokens_ * linear.out) * cast;
    const bool again = options_.recompute != Recompute::kNone;
    // Weights that stay are cast when they have changed, gathered ones each time they come.
    const double casts = options_.params.zero == 3 ? 2 * static_cast<double>(times_) : 1;
    const double weights = static_cast<double>(linear.out * linear.in) * (element_ + 2) * casts;
    const char* op =
        options_.recipe.scaling == QuantScaling::kBlockwise ? "quantize_blocks" : "quantize";
    passes_[op] += inputs * (again ? 2 : 1) + gradients + weights;
  }

  void add_products(const Linear& linear, bool fp8) {
    const bool again = options_.recompute == Recompute::kFull && linear.is_recomputed;
    product(linear, " forward", tokens_, linear.out, linear.in, again ? 2 : 1, fp8);
    product(linear, " dgrad", tokens_, linear.in, linear.out, 1, fp8).is_gradient = true;
    StepProduct& wgrad = product(linear, " wgrad", linear.out, linear.in, tokens_, 1, fp8);
    wgrad.is_gradient = wgrad.is_wgrad = true;
  }
  StepProduct& product(const Linear& linear, const char* kind, std::int64_t m, std::int64_t n,
                       std::int64_t k, std::int64_t count, bool fp8) {
    const std::string name = std::string(linear.name) + kind;
    StepProduct& product = products_[{name, fp8}];
    product.name = name;
    product.m = m;
    product.n = n;
    product.k = k;
    product.is_fp8 = fp8;
    product.count += count * times_;
    return product;
  }

  void pass(const char* op, double bytes) { passes_[op] += bytes * static_cast<double>(times_); }

  const ModelConfig& model_;
  const RuntimeOptions& options_;
  std::int64_t tokens_;  // of a micro-batch on this rank
  double local_tokens_;  // between blocks
  std::int64_t times_;
  double element_;
  QkvLayout layout_;
  std::int64_t ffn_;
  std::int64_t vocab_;
  std::vector<Linear> linears_;
  double parameters_ = 0;
  std::map<std::pair<std::string, bool>, StepProduct> products_;
  std::map<std::string, double> passes_;
  StepWork work_;
};

}  // namespace

double StepWork::product_flops(bool fp8) const {
  double sum = 0;
  for (const StepProduct& product : products) sum += product.is_fp8 == fp8 ? product.flops() : 0;
  return sum;
}

double StepWork::fp8_share() const {
  const double fp8 = product_flops(true);
  return fp8 > 0 ? fp8 / (fp8 + product_flops(false)) : 0;
}

double StepWork::pass_bytes() const {
  double sum = 0;
  for (const StepPass& pass : passes) sum += pass.bytes;
  return sum;
}

StepWork step_work(const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& options,
                   std::int64_t micro_batches, int stage) {
  Counter counter(model, mesh, options, micro_batches);
  for (const StagePiece& piece : stage_pieces(model, mesh.pipeline, options.pipeline.chunks, stage,
                                              options.geometry.max_length)) {
    if (piece.has_embedding) counter.add_embedding();
    for (int i = 0; i < piece.num_layers; ++i) counter.add_block(piece.first_layer + i);
    if (piece.has_head) counter.add_head(!model.tie_word_embeddings || !piece.has_embedding);
  }
  return counter.finish(mesh);
}

}  // namespace tessera
