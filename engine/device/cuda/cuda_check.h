// Error checks of CUDA and its libraries. Each throws an Error that names the call and its place, and
// clears the runtime's last error so that it is not reported again by an unrelated call.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace tessera::cuda {

// Throws; the kind follows from the status (out of memory kAnswerNo, lost hardware kTransient, no
// usable device kUser, anything else kInternal).
[[noreturn]] void fail_cuda(cudaError_t status, const char* call,
                            std::source_location where = std::source_location::current());

// Throws kInternal for a failed call of a library: "[cuBLASLt] cublasLtMatmul failed at ...".
[[noreturn]] void fail_library(const char* library, const char* status, const char* call,
                               std::source_location where = std::source_location::current());

}  // namespace tessera::cuda

#define CUDA_CHECK(call)                                                    \
  do {                                                                      \
    const cudaError_t cuda_check_status = (call);                           \
    if (cuda_check_status != cudaSuccess) [[unlikely]] {                    \
      ::tessera::cuda::fail_cuda(cuda_check_status, #call);                 \
    }                                                                       \
  } while (false)

// For sources that include cublasLt.h.
#define CUBLAS_CHECK(call)                                                                    \
  do {                                                                                        \
    const cublasStatus_t cublas_check_status = (call);                                        \
    if (cublas_check_status != CUBLAS_STATUS_SUCCESS) [[unlikely]] {                          \
      ::tessera::cuda::fail_library("cuBLASLt", cublasLtGetStatusString(cublas_check_status), \
                                    #call);                                                   \
    }                                                                                         \
  } while (false)

// For sources that include cudnn.h.
#define CUDNN_CHECK(call)                                                                        \
  do {                                                                                           \
    const cudnnStatus_t cudnn_check_status = (call);                                             \
    if (cudnn_check_status != CUDNN_STATUS_SUCCESS) [[unlikely]] {                               \
      ::tessera::cuda::fail_library("cuDNN", cudnnGetErrorString(cudnn_check_status), #call);    \
    }                                                                                            \
  } while (false)
