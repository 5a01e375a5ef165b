// Matrix products through cuBLASLt. Bound by arithmetic. cuBLASLt is column-major: a row-major c =
// op(a) op(b) is the column-major c^T = op(b)^T op(a)^T over the same memory, so the operands
// change places and keep their transpositions.
//
// A shape's plan (descriptors and algorithm) is made at its first product and kept with the
// context. The algorithm is the library's first proposal, or, with ContextOptions::autotune_gemm,
// the fastest of its proposals timed on the spot. All of them sum in an order fixed by the
// algorithm: reductions through the output type, which would round partial sums, are ruled out.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "engine/memory/scratch.h"
#include "kernels/cuda/add_bias.h"
#include "kernels/cuda/decode_blocks.h"
#include "kernels/cuda_workspace.h"
#include "kernels/gemm_choices.h"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera::cuda {
namespace {

constexpr int kCandidates = 8;
constexpr int kTimedRuns = 4;

// m, n, k, strides of a, b, c, transpose_a + 2 transpose_b, beta != 0, bias in the epilogue, dtypes
// of a and c, alignments of a, b, c, dtype of b, fast accumulation + 2 scale mode of a + 8 that of
// b.
using Key = std::array<std::int64_t, 16>;

std::string text_of(const Key& key) {
  std::string text;
  for (const std::int64_t value : key) text += fmt::format("{}{}", text.empty() ? "" : " ", value);
  return text;
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF64:
      return CUDA_R_64F;
    case DType::kF8E4M3:
      return CUDA_R_8F_E4M3;
    case DType::kF8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[gemm] no cuda kernel for {}", name_of(dtype));
  }
}

// Bytes, up to 256, that the address is a multiple of.
std::int64_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return static_cast<std::int64_t>(std::min<std::uintptr_t>(256, address & (~address + 1)));
}

// The RAII owners of cuBLASLt's handles.
template <typename Handle, cublasStatus_t (*kDestroy)(Handle)>
struct Owner {
  Handle handle = nullptr;
  Owner() = default;
  Owner(Owner&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Owner& operator=(Owner&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~Owner() {
    if (handle != nullptr) kDestroy(handle);
  }
};
using MatmulDesc = Owner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <typename T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, const T& value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t name,
         const T& value) {
  CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof(value)));
}

// A product as the library sees it: `first` is our b and `second` our a.
struct Problem {
  std::int64_t m, n, k;
  bool has_bias;  // in the epilogue
  bool is_double;
  bool has_scales;        // FP8 operands
  bool has_block_scales;  // and these for vectors or blocks of 128
  Key key;

  explicit Problem(const Gemm& args)
      : m(args.c.rows()),
        n(args.c.cols()),
        k(args.transpose_a ? args.a.rows() : args.a.cols()),
        // Beside FP8 operands the library adds bf16 biases only.
        has_bias(args.bias.defined() && args.bias.dtype == args.c.dtype &&
                 !(is_fp8(args.a.dtype) && args.c.dtype == DType::kF32)),
        is_double(args.a.dtype == DType::kF64),
        has_scales(is_fp8(args.a.dtype)),
        has_block_scales(args.has_block_scales()),
        key{m,
            n,
            k,
            stride_of(args.a),
            stride_of(args.b),
            stride_of(args.c),
            (args.transpose_a ? 1 : 0) + (args.transpose_b ? 2 : 0),
            args.accumulate ? 1 : 0,
            has_bias ? 1 : 0,
            static_cast<std::int64_t>(args.a.dtype),
            static_cast<std::int64_t>(args.c.dtype),
            alignment_of(args.a.data),
            alignment_of(args.b.data),
            alignment_of(args.c.data),
            static_cast<std::int64_t>(args.b.dtype),
            (args.fast_accumulation ? 1 : 0) + 2 * static_cast<std::int64_t>(args.scale_mode_a) +
                8 * static_cast<std::int64_t>(args.scale_mode_b)} {}

  // A matrix of one row may carry any stride; the library wants at least its width.
  static std::int64_t stride_of(const Tensor& t) { return std::max(t.row_stride, t.cols()); }
};

struct Plan {
  MatmulDesc desc;
  Layout first, second, out;
  cublasLtMatmulAlgo_t algorithm{};
  bool is_supported = true;
};

struct Scalars {
  // cuBLASLt reads them as the scale type: double for fp64, else float.
  union Value {
    float single;
    double wide;
  } alpha, beta;
  Scalars(const Gemm& args, bool is_double) {
    if (is_double) {
      alpha.wide = static_cast<double>(args.alpha);
      beta.wide = args.accumulate ? 1.0 : 0.0;
    } else {
      alpha.single = args.alpha;
      beta.single = args.accumulate ? 1.0f : 0.0f;
    }
  }
};

const char* tag_of(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kVector:
      return " by 1x128";
    case ScaleMode::kBlock:
      return " by 128x128";
    default:
      return "";
  }
}

cublasLtMatmulMatrixScale_t library_mode(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kVector:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::kBlock:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

std::string not_supported(const Gemm& args) {
  return fmt::format(
      "[gemm] cuBLASLt has no kernel for a {} {}{}{}, b {} {}{}{}, c {} {}", name_of(args.a.dtype),
      to_string(args.a.shape), args.transpose_a ? " transposed" : "", tag_of(args.scale_mode_a),
      name_of(args.b.dtype), to_string(args.b.shape), args.transpose_b ? " transposed" : "",
      tag_of(args.scale_mode_b), name_of(args.c.dtype), to_string(args.c.shape));
}

// Rows of an operand with scales of vectors that is our a: the library wants multiples of 8.
constexpr std::int64_t kVectorRows = 8;

// What the library says to a product that it has no kernel for.
bool is_refusal(cublasStatus_t status, const Problem& problem) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED ||
         (problem.has_block_scales && status == CUBLAS_STATUS_INVALID_VALUE);
}

class GemmLibrary : public Extension {
 public:
  explicit GemmLibrary(CudaContext& context) : context_(&context) {
    context.make_current();
    CUBLAS_CHECK(cublasLtCreate(&handle_));
  }
  ~GemmLibrary() override { cublasLtDestroy(handle_); }

  void run(const Gemm& args, CudaStream& stream);
  std::string export_choices();
  int import_choices(const nlohmann::json& choices);

 private:
  // False, without having done anything, where the library has no kernel for these arguments.
  bool multiply_planned(const Gemm& args, CudaStream& stream, void* workspace);
  // The same, but operands with block scales are decoded where that helps.
  bool multiply_somehow(const Gemm& args, CudaStream& stream, void* workspace);
  void multiply_decoded(const Gemm& args, CudaStream& stream, void* workspace);
  Plan& plan_for(const Problem& problem, const Gemm& args, CudaStream& stream, void* workspace);
  Plan describe(const Problem& problem, const Gemm& args) const;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates(const Problem& problem, const Gemm& args,
                                                          const Plan& plan) const;
  bool use_imported(const Problem& problem, Plan& plan) const;
  void autotune(const Problem& problem, const Gemm& args, CudaStream& stream, void* workspace,
                const std::vector<cublasLtMatmulHeuristicResult_t>& results, Plan& plan) const;
  cublasStatus_t multiply(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Gemm& args,
                          const Scalars& scalars, void* c, void* workspace,
                          cudaStream_t stream) const {
    return cublasLtMatmul(handle_, plan.desc.handle, &scalars.alpha, args.b.data, plan.first.handle,
                          args.a.data, plan.second.handle, &scalars.beta, c, plan.out.handle, c,
                          plan.out.handle, &algorithm, workspace,
                          context_->capabilities().gemm_workspace, stream);
  }

  CudaContext* context_;
  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
  std::map<std::string, cublasLtMatmulAlgo_t> imported_;
  std::set<Key> decoded_;  // products that have been reported as decoded
};

// The library reads the scales from the device; its first operand is our b.
void set_scales(const Plan& plan, const Gemm& args) {
  const void* first = args.scale_b.data;
  const void* second = args.scale_a.data;
  set(plan.desc.handle, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, first);
  set(plan.desc.handle, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, second);
}

Plan GemmLibrary::describe(const Problem& problem, const Gemm& args) const {
  Plan plan;
  // CUBLAS_COMPUTE_32F multiplies fp32 in fp32: TF32 has its own compute types.
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.desc.handle,
                                        problem.is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                        problem.is_double ? CUDA_R_64F : CUDA_R_32F));
  const cublasOperation_t first = args.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = args.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  set(plan.desc.handle, CUBLASLT_MATMUL_DESC_TRANSA, first);
  set(plan.desc.handle, CUBLASLT_MATMUL_DESC_TRANSB, second);
  if (problem.has_bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    const cudaDataType_t bias_type = data_type(args.bias.dtype);
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
    const void* bias = args.bias.data;
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  if (problem.has_scales) {
    const std::int8_t fast = args.fast_accumulation ? 1 : 0;
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
    set_scales(plan, args);
  }
  if (problem.has_block_scales) {
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, library_mode(args.scale_mode_b));
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, library_mode(args.scale_mode_a));
  }
  const auto layout = [](Layout& out, const Tensor& t) {
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(
        &out.handle, data_type(t.dtype), static_cast<std::uint64_t>(t.cols()),
        static_cast<std::uint64_t>(t.rows()), Problem::stride_of(t)));
  };
  layout(plan.first, args.b);
  layout(plan.second, args.a);
  layout(plan.out, args.c);
  return plan;
}

std::vector<cublasLtMatmulHeuristicResult_t> GemmLibrary::candidates(const Problem& problem,
                                                                     const Gemm&,
                                                                     const Plan& plan) const {
  Preference preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
  set(preference.handle, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      context_->capabilities().gemm_workspace);
  // Split sums are added in the compute type; "none" is always allowed.
  set(preference.handle, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto alignment = [&](int index) { return static_cast<std::uint32_t>(problem.key[index]); };
  set(preference.handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(12));
  set(preference.handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(11));
  set(preference.handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(13));
  set(preference.handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(13));
  std::vector<cublasLtMatmulHeuristicResult_t> results(kCandidates);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_, plan.desc.handle, plan.first.handle, plan.second.handle, plan.out.handle,
      plan.out.handle, preference.handle, kCandidates, results.data(), &found);
  if (!is_refusal(status, problem)) CUBLAS_CHECK(status);
  results.resize(static_cast<std::size_t>(found));
  std::erase_if(results, [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; });
  return results;
}

bool GemmLibrary::use_imported(const Problem& problem, Plan& plan) const {
  const auto found = imported_.find(text_of(problem.key));
  if (found == imported_.end()) return false;
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle_, plan.desc.handle, plan.first.handle, plan.second.handle,
                              plan.out.handle, plan.out.handle, &found->second, &result);
  if (status != CUBLAS_STATUS_SUCCESS ||
      result.workspaceSize > context_->capabilities().gemm_workspace) {
    log::warning("[gemm] the kept algorithm of {} x {} x {} cannot be used here; choosing anew",
                 problem.m, problem.n, problem.k);
    return false;
  }
  plan.algorithm = found->second;
  return true;
}

// Times every candidate. An accumulating product must change c once only, so those are timed into a
// copy; without memory for it the first proposal stays.
void GemmLibrary::autotune(const Problem& problem, const Gemm& args, CudaStream& stream,
                           void* workspace,
                           const std::vector<cublasLtMatmulHeuristicResult_t>& results,
                           Plan& plan) const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(stream.native(), &capture));
  if (capture != cudaStreamCaptureStatusNone || results.size() < 2) return;
  void* c = args.c.data;
  void* copy = nullptr;
  if (args.accumulate) {
    const std::size_t bytes =
        static_cast<std::size_t>((problem.m - 1) * problem.key[5] + problem.n) *
        size_of(args.c.dtype);
    if (cudaMalloc(&copy, bytes) != cudaSuccess) {
      cudaGetLastError();
      log::warning("[gemm] no memory to time {} x {} x {}; its first proposal is used", problem.m,
                   problem.n, problem.k);
      return;
    }
    CUDA_CHECK(cudaMemcpyAsync(copy, c, bytes, cudaMemcpyDeviceToDevice, stream.native()));
    c = copy;
  }
  const Scalars scalars(args, problem.is_double);
  CudaEvent start(*context_), end(*context_);
  double best = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto run = [&] {
      return multiply(plan, results[i].algo, args, scalars, c, workspace, stream.native()) ==
             CUBLAS_STATUS_SUCCESS;
    };
    if (!run()) continue;
    stream.record(start);
    for (int r = 0; r < kTimedRuns; ++r) run();
    stream.record(end);
    end.synchronize();
    const double milliseconds = end.milliseconds_since(start);
    // A later candidate must win by more than the noise, so that repeated runs mostly agree.
    if (best == 0 || milliseconds < 0.98 * best) {
      best = milliseconds;
      plan.algorithm = results[i].algo;
    }
  }
  if (copy != nullptr) CUDA_CHECK(cudaFree(copy));
}

Plan& GemmLibrary::plan_for(const Problem& problem, const Gemm& args, CudaStream& stream,
                            void* workspace) {
  const auto found = plans_.find(problem.key);
  if (found != plans_.end()) return found->second;
  Plan plan = describe(problem, args);
  if (!use_imported(problem, plan)) {
    const auto results = candidates(problem, args, plan);
    plan.is_supported = !results.empty();
    if (plan.is_supported) {
      plan.algorithm = results.front().algo;
      if (context_->options().autotune_gemm)
        autotune(problem, args, stream, workspace, results, plan);
    }
  }
  return plans_.emplace(problem.key, std::move(plan)).first->second;
}

void GemmLibrary::run(const Gemm& args, CudaStream& stream) {
  const auto workspace = stream.scratch().take(context_->capabilities().gemm_workspace);
  if (gemm_sums_apart(args)) {
    const auto memory =
        stream.scratch().take(static_cast<std::size_t>(args.c.numel()) * sizeof(float));
    Gemm product = args;
    product.c =
        Tensor(memory.data(), DType::kF32, Shape{args.c.rows(), args.c.cols()}, args.c.device);
    product.accumulate = false;
    product.bias = Tensor();
    CHECK(multiply_somehow(product, stream, workspace.data()), "{}", not_supported(product));
    add_product_and_bias(product.c, args.bias, args.accumulate, args.c, stream);
    return;
  }
  if (multiply_somehow(args, stream, workspace.data())) return;
  CHECK(args.bias.defined(), "{}", not_supported(args));
  // No kernel adds this bias: it goes into c first and the product is added to it, so that c is
  // rounded once. (An fp32 or fp64 c may hold its old value too; a bf16 one was dealt with above.)
  Gemm rest = args;
  rest.bias = Tensor();
  rest.accumulate = true;
  add_bias(args.bias, args.accumulate, args.c, stream);
  CHECK(multiply_somehow(rest, stream, workspace.data()), "{}", not_supported(rest));
}

bool GemmLibrary::multiply_somehow(const Gemm& args, CudaStream& stream, void* workspace) {
  if (multiply_planned(args, stream, workspace)) return true;
  // A bias is dealt with first: see run().
  if (!args.has_block_scales() || args.bias.defined()) return false;
  multiply_decoded(args, stream, workspace);
  return true;
}

void GemmLibrary::multiply_decoded(const Gemm& args, CudaStream& stream, void* workspace) {
  {
    const std::lock_guard lock(mutex_);
    if (decoded_.insert(Problem(args).key).second) {
      log::warning("{}: its operands are decoded to bf16 and multiplied so", not_supported(args));
    }
  }
  const auto a_memory = stream.scratch().take(panel_bytes(args.a));
  const auto b_memory = stream.scratch().take(panel_bytes(args.b));
  const std::int64_t a_rows = panel_rows(args.a), b_rows = panel_rows(args.b);
  const auto decode = [&](const Tensor& in, const Tensor& scale, ScaleMode mode, std::int64_t first,
                          std::int64_t rows, void* memory) {
    const Tensor panel(memory, DType::kBF16, Shape{rows, in.cols()}, in.device);
    decode_blocks(in, scale, mode, first, panel, stream);
    return panel;
  };
  for (std::int64_t j = 0; j < args.b.rows(); j += b_rows) {
    const std::int64_t width = std::min(b_rows, args.b.rows() - j);
    Gemm product;
    product.transpose_b = true;
    product.alpha = args.alpha;
    product.accumulate = args.accumulate;
    product.b = decode(args.b, args.scale_b, args.scale_mode_b, j, width, b_memory.data());
    for (std::int64_t i = 0; i < args.a.rows(); i += a_rows) {
      const std::int64_t height = std::min(a_rows, args.a.rows() - i);
      product.a = decode(args.a, args.scale_a, args.scale_mode_a, i, height, a_memory.data());
      product.c = args.c.row_slice(i, height).col_slice(j, width);
      CHECK(multiply_planned(product, stream, workspace), "{}", not_supported(product));
    }
  }
}

bool GemmLibrary::multiply_planned(const Gemm& args, CudaStream& stream, void* workspace) {
  const Problem problem(args);
  // The library cannot add this one: wrong type.
  if (args.bias.defined() && !problem.has_bias) return false;
  if (args.scale_mode_a == ScaleMode::kVector && problem.m % kVectorRows != 0) return false;
  const cudaStream_t s = cuda::native(stream);
  const std::lock_guard lock(mutex_);
  Plan& plan = plan_for(problem, args, stream, workspace);
  if (!plan.is_supported) return false;
  if (problem.has_bias) {
    const void* bias = args.bias.data;
    set(plan.desc.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  if (problem.has_scales) set_scales(plan, args);
  const cublasStatus_t status = multiply(
      plan, plan.algorithm, args, Scalars(args, problem.is_double), args.c.data, workspace, s);
  if (problem.has_block_scales && is_refusal(status, problem)) {
    plan.is_supported = false;
    return false;
  }
  CUBLAS_CHECK(status);
  return true;
}

std::string hex_of(const cublasLtMatmulAlgo_t& algorithm) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
  std::string text;
  for (std::size_t i = 0; i < sizeof(algorithm); ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

bool parse_hex(const std::string& text, cublasLtMatmulAlgo_t* algorithm) {
  if (text.size() != 2 * sizeof(*algorithm)) return false;
  auto* bytes = reinterpret_cast<unsigned char*>(algorithm);
  for (std::size_t i = 0; i < sizeof(*algorithm); ++i) {
    const std::string pair = text.substr(2 * i, 2);
    if (!std::isxdigit(static_cast<unsigned char>(pair[0])) ||
        !std::isxdigit(static_cast<unsigned char>(pair[1]))) {
      return false;
    }
    bytes[i] = static_cast<unsigned char>(std::stoi(pair, nullptr, 16));
  }
  return true;
}

std::string GemmLibrary::export_choices() {
  const std::lock_guard lock(mutex_);
  nlohmann::json choices = nlohmann::json::object();
  for (const auto& [key, algorithm] : imported_) choices[key] = hex_of(algorithm);
  for (const auto& [key, plan] : plans_) {
    if (plan.is_supported) choices[text_of(key)] = hex_of(plan.algorithm);
  }
  const nlohmann::json all = {
      {"gpu", context_->gpu_name()}, {"library", cublasLtGetVersion()}, {"choices", choices}};
  return all.dump(1);
}

int GemmLibrary::import_choices(const nlohmann::json& choices) {
  const std::lock_guard lock(mutex_);
  int taken = 0;
  for (const auto& [key, value] : choices.items()) {
    cublasLtMatmulAlgo_t algorithm{};
    CHECK_USER(value.is_string() && parse_hex(value.get<std::string>(), &algorithm),
               "[gemm] the kept algorithm of shape \"{}\" is not {} hexadecimal digits; delete the "
               "file or "
               "entry to choose anew",
               key, 2 * sizeof(algorithm));
    imported_[key] = algorithm;
    ++taken;
  }
  return taken;
}

// c = 0 (or as it is) plus bias: a product over nothing.
void empty_product(const Gemm& args, Stream& stream) {
  if (!args.accumulate) {
    const cudaStream_t s = native(stream);
    const std::size_t size = size_of(args.c.dtype);
    CUDA_CHECK(cudaMemset2DAsync(args.c.data,
                                 static_cast<std::size_t>(Problem::stride_of(args.c)) * size, 0,
                                 static_cast<std::size_t>(args.c.cols()) * size,
                                 static_cast<std::size_t>(args.c.rows()), s));
  }
  if (args.bias.defined()) add_bias(args.bias, true, args.c, stream);
}

}  // namespace

void gemm(const Gemm& args, Stream& stream) {
  if (args.c.numel() == 0) return;
  if (args.a.numel() == 0) return empty_product(args, stream);
  CudaStream& cuda_stream = as_cuda(stream);
  cuda_stream.cuda_context().extension<GemmLibrary>().run(args, cuda_stream);
}

std::string export_gemm_choices(BackendContext& context) {
  return as_cuda(context).extension<GemmLibrary>().export_choices();
}

int import_gemm_choices(BackendContext& context, const std::string& text) {
  CudaContext& cuda_context = as_cuda(context);
  const nlohmann::json all = nlohmann::json::parse(text, nullptr, false);
  CHECK_USER(all.is_object() && all.contains("gpu") && all.contains("library") &&
                 all.contains("choices") && all["choices"].is_object(),
             "[gemm] the text of kept algorithms is not an export of this program; delete it to "
             "choose anew");
  if (all["gpu"] != cuda_context.gpu_name() || all["library"] != cublasLtGetVersion()) {
    log::info("[gemm] kept algorithms are for {} and cuBLASLt {}, this is {} and {}: choosing anew",
              all["gpu"].dump(), all["library"].dump(), cuda_context.gpu_name(),
              cublasLtGetVersion());
    return 0;
  }
  return cuda_context.extension<GemmLibrary>().import_choices(all["choices"]);
}

}  // namespace tessera::cuda
