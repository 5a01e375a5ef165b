// Attention through cuDNN's fused kernels, bf16. Packed documents are ragged batches: a batch entry
// per document with its length and offset on the device, so one plan serves every packing of a
// shape and documents of length zero cost an empty block. Plans are built at the first use of a
// shape and kept with the context; handles belong to streams.
#include "kernels/cuda/attention_paths.h"

#if defined(TESSERA_WITH_CUDNN)

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "engine/memory/scratch.h"
#include "kernels/cuda_workspace.h"

namespace tessera::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDq,
  kDk,
  kDv,
  kLengthQ,
  kLengthK,
  // Offsets of the tensor with uid u are kOffsets + u.
  kOffsets = 100,
};

class CudnnHandle : public Extension {
 public:
  explicit CudnnHandle(CudaStream& stream) {
    stream.cuda_context().make_current();
    CUDNN_CHECK(cudnnCreate(&handle_));
    CUDNN_CHECK(cudnnSetStream(handle_, stream.native()));
  }
  ~CudnnHandle() override { cudnnDestroy(handle_); }
  cudnnHandle_t get() const { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

// Backward?, deterministic?, with lse?, same bounds?, documents, Sq, Sk, heads_q, heads_kv,
// head_dim, window, scale bits, Tq, Tk, the row strides of q, k, v, out, dout, dq, dk, dv, and
// heads in a row of lse.
using Key = std::array<std::int64_t, 23>;

struct Plan {
  std::shared_ptr<Graph> graph;  // null: cuDNN has no kernel for this shape
  std::int64_t workspace = 0;
};

class CudnnPlans : public Extension {
 public:
  explicit CudnnPlans(CudaContext&) {}
  std::mutex mutex;
  std::map<Key, Plan> plans;
};

// Documents as the library sees them: padded lengths are bounds only, memory is ragged.
struct Extents {
  std::int64_t documents, queries, keys;  // longest document, in multiples of 128

  template <typename Args>
  explicit Extents(const Args& args)
      : documents(args.cu_q.numel() - 1),
        queries(bound(args.shape.max_length, args.q.rows())),
        keys(bound(args.shape.max_length, args.k.rows())) {}

  static std::int64_t bound(std::int64_t length, std::int64_t rows) {
    const std::int64_t longest = length > 0 ? std::min(length, rows) : rows;
    return (std::max<std::int64_t>(longest, 1) + 127) / 128 * 128;
  }
};

bool is_vector_aligned(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.row_stride % 8 == 0;
}

// The tensors of one plan.
class Builder {
 public:
  // `lse_heads`: heads in a row of lse, of which the plan takes the first shape.heads_q.
  Builder(const AttentionShape& shape, const Extents& extents, std::int64_t lse_heads)
      : shape_(shape), extents_(extents), lse_heads_(lse_heads), graph_(std::make_shared<Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  TensorPtr operand(Uid uid, const char* name, const Tensor& t, bool of_keys) {
    const TensorPtr result = graph_->tensor(attributes(uid, name, t, of_keys));
    return result;
  }
  // Shape, strides and offsets of an output tensor.
  void describe_output(const TensorPtr& output, Uid uid, const Tensor& t, bool of_keys) {
    output->set_output(true).set_uid(uid).set_dim(dims(t, of_keys)).set_stride(strides(t, of_keys));
    output->set_ragged_offset(offsets(uid));
  }
  fe::graph::Tensor_attributes lse_attributes() {
    fe::graph::Tensor_attributes result;
    result.set_name("lse").set_uid(kLse).set_data_type(fe::DataType_t::FLOAT);
    result.set_dim(lse_dims()).set_stride(lse_strides());
    result.set_ragged_offset(offsets(kLse));
    return result;
  }
  std::vector<std::int64_t> lse_dims() const {
    return {extents_.documents, shape_.heads_q, extents_.queries, 1};
  }
  std::vector<std::int64_t> lse_strides() const {
    return {extents_.queries * lse_heads_, 1, lse_heads_, 1};
  }
  TensorPtr offsets(Uid uid) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name("offsets" + std::to_string(uid))
                              .set_uid(kOffsets + uid)
                              .set_dim({extents_.documents + 1, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT64));
  }
  TensorPtr lengths(Uid uid) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name("lengths" + std::to_string(uid))
                              .set_uid(uid)
                              .set_dim({extents_.documents, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
  }
  template <typename Attributes>
  void set_mask(Attributes& attributes, bool same_bounds, const TensorPtr& length_q,
                const TensorPtr& length_k) {
    attributes.set_attn_scale(shape_.scale)
        .set_padding_mask(true)
        .set_seq_len_q(length_q)
        .set_seq_len_kv(length_k)
        // A document's queries are its last ones; with as many queries as keys both corners agree.
        .set_diagonal_alignment(same_bounds ? fe::DiagonalAlignment_t::TOP_LEFT
                                            : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    if (shape_.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(shape_.window));
  }
  const std::shared_ptr<Graph>& graph() const { return graph_; }

 private:
  std::int64_t heads(const Tensor& t) const { return t.cols() / shape_.head_dim; }
  std::vector<std::int64_t> dims(const Tensor& t, bool of_keys) const {
    return {extents_.documents, heads(t), of_keys ? extents_.keys : extents_.queries,
            shape_.head_dim};
  }
  std::vector<std::int64_t> strides(const Tensor& t, bool of_keys) const {
    return {(of_keys ? extents_.keys : extents_.queries) * t.row_stride, shape_.head_dim,
            t.row_stride, 1};
  }
  fe::graph::Tensor_attributes attributes(Uid uid, const char* name, const Tensor& t,
                                          bool of_keys) {
    fe::graph::Tensor_attributes result;
    result.set_name(name).set_uid(uid).set_dim(dims(t, of_keys)).set_stride(strides(t, of_keys));
    result.set_ragged_offset(offsets(uid));
    return result;
  }

  const AttentionShape& shape_;
  Extents extents_;
  std::int64_t lse_heads_;
  std::shared_ptr<Graph> graph_;
};

// Builds the plan; a shape without a kernel, or whose workspace is above what is planned, has no
// graph.
Plan finish_plan(const std::shared_ptr<Graph>& graph, cudnnHandle_t handle, std::size_t planned,
                 const char* who, const AttentionShape& shape) {
  Plan plan;
  auto status = graph->build(handle, {fe::HeurMode_t::A});
  if (status.is_bad()) {
    cudaGetLastError();
    log::info(
        "[{}] cuDNN has no kernel for {} over {} heads of {}, window {}: {}; own kernels are used",
        who, shape.heads_q, shape.heads_kv, shape.head_dim, shape.window, status.get_message());
    return plan;
  }
  std::int64_t workspace = 0;
  if (graph->get_workspace_size(workspace).is_bad()) return plan;
  log::debug("[{}] cuDNN workspace is {} bytes of {} planned", who, workspace, planned);
  if (workspace > static_cast<std::int64_t>(planned)) {
    log::warning("[{}] cuDNN wants {} bytes of workspace, {} are planned; own kernels are used",
                 who, workspace, planned);
    return plan;
  }
  plan.graph = graph;
  plan.workspace = workspace;
  return plan;
}

Plan build_forward(const AttentionForward& args, const Extents& extents, cudnnHandle_t handle,
                   std::size_t planned) {
  Builder builder(args.shape, extents, args.shape.heads_q);
  const TensorPtr q = builder.operand(kQ, "q", args.q, false);
  const TensorPtr k = builder.operand(kK, "k", args.k, true);
  const TensorPtr v = builder.operand(kV, "v", args.v, true);
  fe::graph::SDPA_attributes attributes;
  attributes.set_name("attention_forward").set_generate_stats(args.lse.defined());
  builder.set_mask(attributes, args.cu_q.data == args.cu_k.data, builder.lengths(kLengthQ),
                   builder.lengths(kLengthK));
  auto [out, lse] = builder.graph()->sdpa(q, k, v, attributes);
  builder.describe_output(out, kOut, args.out, false);
  if (args.lse.defined()) {
    lse->set_output(true).set_uid(kLse).set_data_type(fe::DataType_t::FLOAT);
    lse->set_dim(builder.lse_dims()).set_stride(builder.lse_strides());
    lse->set_ragged_offset(builder.offsets(kLse));
  }
  return finish_plan(builder.graph(), handle, planned, "attention_forward", args.shape);
}

Plan build_backward(const AttentionBackward& args, const Extents& extents, cudnnHandle_t handle,
                    std::size_t planned) {
  Builder builder(args.shape, extents, args.lse.cols());
  const TensorPtr q = builder.operand(kQ, "q", args.q, false);
  const TensorPtr k = builder.operand(kK, "k", args.k, true);
  const TensorPtr v = builder.operand(kV, "v", args.v, true);
  const TensorPtr out = builder.operand(kOut, "out", args.out, false);
  const TensorPtr dout = builder.operand(kDout, "dout", args.dout, false);
  const TensorPtr lse = builder.graph()->tensor(builder.lse_attributes());
  fe::graph::SDPA_backward_attributes attributes;
  attributes.set_name("attention_backward").set_deterministic_algorithm(args.deterministic);
  // Accumulators of the size of the packed rows, not of documents x longest document.
  attributes.set_max_total_seq_len_q(args.q.rows()).set_max_total_seq_len_kv(args.k.rows());
  builder.set_mask(attributes, args.cu_q.data == args.cu_k.data, builder.lengths(kLengthQ),
                   builder.lengths(kLengthK));
  auto [dq, dk, dv] = builder.graph()->sdpa_backward(q, k, v, out, dout, lse, attributes);
  builder.describe_output(dq, kDq, args.dq, false);
  builder.describe_output(dk, kDk, args.dk, true);
  builder.describe_output(dv, kDv, args.dv, true);
  return finish_plan(builder.graph(), handle, planned, "attention_backward", args.shape);
}

template <typename Args>
Key common_key(const Args& args, const Extents& extents) {
  Key key{};
  key[2] = args.lse.defined() ? 1 : 0;
  key[3] = args.cu_q.data == args.cu_k.data ? 1 : 0;
  key[4] = extents.documents;
  key[5] = extents.queries;
  key[6] = extents.keys;
  key[7] = args.shape.heads_q;
  key[8] = args.shape.heads_kv;
  key[9] = args.shape.head_dim;
  key[10] = args.shape.window;
  key[11] = std::bit_cast<std::int32_t>(args.shape.scale);
  key[14] = args.q.row_stride;
  key[15] = args.k.row_stride;
  key[16] = args.v.row_stride;
  key[17] = args.out.row_stride;
  return key;
}

// Hands out the pieces of the bounds scratch and remembers where each array went.
class Bounds {
 public:
  template <typename Args>
  Bounds(const Args& args, void* memory) : next_(static_cast<char*>(memory)) {
    offsets_.cu_q = static_cast<const std::int32_t*>(args.cu_q.data);
    offsets_.cu_k = static_cast<const std::int32_t*>(args.cu_k.data);
    offsets_.documents = args.cu_q.numel() - 1;
  }
  void add(Uid uid, std::int64_t stride, bool of_keys,
           std::unordered_map<std::int64_t, void*>& pointers) {
    auto& array = offsets_.arrays[offsets_.count++];
    array = {take<std::int64_t>(offsets_.documents + 1), stride, of_keys};
    pointers[kOffsets + uid] = array.offsets;
  }
  void finish(std::unordered_map<std::int64_t, void*>& pointers, Stream& stream) {
    offsets_.length_q = take<std::int32_t>(offsets_.documents);
    offsets_.length_k = take<std::int32_t>(offsets_.documents);
    pointers[kLengthQ] = offsets_.length_q;
    pointers[kLengthK] = offsets_.length_k;
    fill_document_offsets(offsets_, stream);
  }

 private:
  template <typename T>
  T* take(std::int64_t count) {
    T* result = reinterpret_cast<T*>(next_);
    next_ += static_cast<std::size_t>(count) * sizeof(T);
    return result;
  }

  char* next_;
  DocumentOffsets offsets_;
};

void execute(const Plan& plan, cudnnHandle_t handle,
             std::unordered_map<std::int64_t, void*>& pointers, void* workspace, const char* who) {
  auto status = plan.graph->execute(handle, pointers, workspace);
  CHECK(status.is_good(), "[{}] cuDNN failed: {}", who, status.get_message());
}

template <typename Build>
Plan& find_plan(CudaStream& stream, const Key& key, Build&& build) {
  CudnnPlans& cache = stream.cuda_context().extension<CudnnPlans>();
  const std::lock_guard lock(cache.mutex);
  const auto found = cache.plans.find(key);
  if (found != cache.plans.end()) return found->second;
  return cache.plans.emplace(key, build()).first->second;
}

// The operands cut to `heads_kv` key heads and their query heads, turn `index`.
AttentionBackward heads_of_turn(const AttentionBackward& args, std::int64_t heads_kv,
                                std::int64_t index) {
  const std::int64_t heads_q = heads_kv * (args.shape.heads_q / args.shape.heads_kv);
  AttentionBackward turn = args;
  turn.shape.heads_q = heads_q;
  turn.shape.heads_kv = heads_kv;
  for (Tensor* t : {&turn.q, &turn.out, &turn.dout, &turn.dq}) {
    *t = t->col_slice(index * heads_q * args.shape.head_dim, heads_q * args.shape.head_dim);
  }
  for (Tensor* t : {&turn.k, &turn.v, &turn.dk, &turn.dv}) {
    *t = t->col_slice(index * heads_kv * args.shape.head_dim, heads_kv * args.shape.head_dim);
  }
  turn.lse.data = static_cast<float*>(turn.lse.data) + index * heads_q;
  return turn;
}

}  // namespace

bool cudnn_attention_forward(const AttentionForward& args, Stream& stream) {
  const CudnnScratch planned = cudnn_scratch(args, stream.context().capabilities());
  if (planned.bounds == 0) return false;
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.out}) {
    if (!is_vector_aligned(*t)) return false;
  }
  CudaStream& cuda_stream = as_cuda(stream);
  native(stream);
  const cudnnHandle_t handle = cuda_stream.extension<CudnnHandle>().get();
  const Extents extents(args);
  const Key key = common_key(args, extents);
  const Plan& plan = find_plan(
      cuda_stream, key, [&] { return build_forward(args, extents, handle, planned.library); });
  if (plan.graph == nullptr) return false;
  const auto bounds_memory = stream.scratch().take(planned.bounds);
  const auto workspace = stream.scratch().take(planned.library);
  std::unordered_map<std::int64_t, void*> pointers{
      {kQ, args.q.data}, {kK, args.k.data}, {kV, args.v.data}, {kOut, args.out.data}};
  Bounds bounds(args, bounds_memory.data());
  bounds.add(kQ, args.q.row_stride, false, pointers);
  bounds.add(kK, args.k.row_stride, true, pointers);
  bounds.add(kV, args.v.row_stride, true, pointers);
  bounds.add(kOut, args.out.row_stride, false, pointers);
  if (args.lse.defined()) {
    pointers[kLse] = args.lse.data;
    bounds.add(kLse, args.shape.heads_q, false, pointers);
  }
  bounds.finish(pointers, stream);
  execute(plan, handle, pointers, workspace.data(), "attention_forward");
  zero_rows_past_end(args.cu_q, {args.out}, stream);
  return true;
}

bool cudnn_attention_backward(const AttentionBackward& args, Stream& stream) {
  const CudnnScratch planned = cudnn_scratch(args, stream.context().capabilities());
  if (planned.bounds == 0) return false;
  // Documents with fewer queries than keys got a wrong dv from it (measured, cuDNN 9 on an H200).
  if (args.cu_q.data != args.cu_k.data) return false;
  for (const Tensor* t :
       {&args.q, &args.k, &args.v, &args.out, &args.dout, &args.dq, &args.dk, &args.dv}) {
    if (!is_vector_aligned(*t)) return false;
  }
  CudaStream& cuda_stream = as_cuda(stream);
  native(stream);
  const cudnnHandle_t handle = cuda_stream.extension<CudnnHandle>().get();
  const std::int64_t turns = args.shape.heads_kv / planned.heads_kv;
  AttentionBackward turn = heads_of_turn(args, planned.heads_kv, 0);
  const Extents extents(turn);
  Key key = common_key(turn, extents);
  key[0] = 1;
  key[1] = args.deterministic ? 1 : 0;
  key[12] = args.q.rows();
  key[13] = args.k.rows();
  key[18] = args.dout.row_stride;
  key[19] = args.dq.row_stride;
  key[20] = args.dk.row_stride;
  key[21] = args.dv.row_stride;
  key[22] = args.lse.cols();
  const Plan& plan = find_plan(
      cuda_stream, key, [&] { return build_backward(turn, extents, handle, planned.library); });
  if (plan.graph == nullptr) return false;
  const auto bounds_memory = stream.scratch().take(planned.bounds);
  const auto workspace = stream.scratch().take(planned.library);
  std::unordered_map<std::int64_t, void*> pointers;
  Bounds bounds(args, bounds_memory.data());
  bounds.add(kQ, args.q.row_stride, false, pointers);
  bounds.add(kK, args.k.row_stride, true, pointers);
  bounds.add(kV, args.v.row_stride, true, pointers);
  bounds.add(kOut, args.out.row_stride, false, pointers);
  bounds.add(kLse, args.lse.cols(), false, pointers);
  bounds.add(kDout, args.dout.row_stride, false, pointers);
  bounds.add(kDq, args.dq.row_stride, false, pointers);
  bounds.add(kDk, args.dk.row_stride, true, pointers);
  bounds.add(kDv, args.dv.row_stride, true, pointers);
  bounds.finish(pointers, stream);
  for (std::int64_t i = 0; i < turns; ++i) {
    turn = heads_of_turn(args, planned.heads_kv, i);
    pointers[kQ] = turn.q.data;
    pointers[kK] = turn.k.data;
    pointers[kV] = turn.v.data;
    pointers[kOut] = turn.out.data;
    pointers[kLse] = turn.lse.data;
    pointers[kDout] = turn.dout.data;
    pointers[kDq] = turn.dq.data;
    pointers[kDk] = turn.dk.data;
    pointers[kDv] = turn.dv.data;
    execute(plan, handle, pointers, workspace.data(), "attention_backward");
  }
  // Queries and keys have the same bounds here.
  zero_rows_past_end(args.cu_q, {args.dq, args.dk, args.dv}, stream);
  return true;
}

}  // namespace tessera::cuda

#else

namespace tessera::cuda {

bool cudnn_attention_forward(const AttentionForward&, Stream&) { return false; }
bool cudnn_attention_backward(const AttentionBackward&, Stream&) { return false; }

}  // namespace tessera::cuda

#endif
