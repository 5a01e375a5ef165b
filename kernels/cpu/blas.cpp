#include "kernels/cpu/blas.h"

#include <cblas.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <limits>

#include "engine/core/error.h"
#include "engine/device/cpu/cpu_stream.h"

namespace tessera::cpu {
namespace {

// OpenBLAS takes a work area of this size for each thread at its first product, and tries for ever if
// it gets none.
constexpr std::size_t kWorkArea = (std::size_t{128} << 20) + 65536;

void require_work_area() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  void* probe = mmap(nullptr, kWorkArea, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe == MAP_FAILED) {
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[memory] the {} MiB of address space that this process may have (ulimit -v) leave no "
                 "room for OpenBLAS' {} MiB a thread; raise the limit",
                 limit.rlim_cur >> 20, kWorkArea >> 20);
  }
  munmap(probe, kWorkArea);
}

// OpenBLAS' thread pool is shared by the whole process and would split sums by the number of cores;
// threads are ours (ThreadTeam), each calling it for a tile of its own.
void prepare_thread() {
  [[maybe_unused]] static const bool once = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  thread_local bool is_ready = false;
  if (is_ready) return;
  require_work_area();
  is_ready = true;
}

blasint narrow(std::int64_t value) {
  CHECK(value <= std::numeric_limits<blasint>::max(), "[blas] size {} exceeds the library's integers",
        value);
  return static_cast<blasint>(value);
}

CBLAS_TRANSPOSE transpose(bool flag) { return flag ? CblasTrans : CblasNoTrans; }

template <typename T>
void scale_only(const BlasGemm<T>& args) {
  for (std::int64_t i = 0; i < args.m; ++i) {
    T* c = args.c + i * args.ldc;
    for (std::int64_t j = 0; j < args.n; ++j) c[j] = args.beta == T(0) ? T(0) : args.beta * c[j];
  }
}

}  // namespace

void blas_gemm(const BlasGemm<float>& args) {
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) return scale_only(args);
  prepare_thread();
  cblas_sgemm(CblasRowMajor, transpose(args.transpose_a), transpose(args.transpose_b), narrow(args.m),
              narrow(args.n), narrow(args.k), args.alpha, args.a, narrow(args.lda), args.b,
              narrow(args.ldb), args.beta, args.c, narrow(args.ldc));
}

void blas_gemm(const BlasGemm<double>& args) {
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) return scale_only(args);
  prepare_thread();
  cblas_dgemm(CblasRowMajor, transpose(args.transpose_a), transpose(args.transpose_b), narrow(args.m),
              narrow(args.n), narrow(args.k), args.alpha, args.a, narrow(args.lda), args.b,
              narrow(args.ldb), args.beta, args.c, narrow(args.ldc));
}

namespace {

template <typename Announce>
void announce_rows([[maybe_unused]] const Tensor& t, [[maybe_unused]] Announce announce) {
#if defined(__SANITIZE_THREAD__)
  if (t.numel() == 0) return;
  const std::size_t element = size_of(t.dtype);
  if (t.is_dense()) return announce(static_cast<char*>(t.data), t.bytes());
  for (std::int64_t i = 0; i < t.rows(); ++i) {
    announce(static_cast<char*>(t.data) + i * t.row_stride * static_cast<std::int64_t>(element),
             static_cast<std::size_t>(t.cols()) * element);
  }
#endif
}

}  // namespace

void announce_rows_read(const Tensor& t) {
  announce_rows(t, [](char* data, std::size_t bytes) { announce_read(data, bytes); });
}

void announce_rows_write(const Tensor& t) {
  announce_rows(t, [](char* data, std::size_t bytes) { announce_write(data, bytes); });
}

}  // namespace tessera::cpu
