#include "engine/device/cuda/cuda_check.h"

#include "engine/core/error.h"

namespace tessera::cuda {
namespace {

ErrorKind kind_of(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return ErrorKind::kAnswerNo;
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorSystemNotReady:
    case cudaErrorMpsConnectionFailed:
      return ErrorKind::kTransient;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorSystemDriverMismatch:
      return ErrorKind::kUser;
    default:
      return ErrorKind::kInternal;
  }
}

const char* advice_of(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
      return "; this build holds no code for this GPU: add its architecture to CMAKE_CUDA_ARCHITECTURES";
    case cudaErrorInsufficientDriver:
      return "; the driver is older than the CUDA toolkit of this build: update the driver";
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return "; the hardware reported an error: restart on another GPU";
    default:
      return "";
  }
}

}  // namespace

void fail_cuda(cudaError_t status, const char* call, std::source_location where) {
  cudaGetLastError();
  throw Error(kind_of(status),
              fmt::format("[cuda] {} failed at {}:{}: {} ({}){}", call, where.file_name(), where.line(),
                          cudaGetErrorName(status), cudaGetErrorString(status), advice_of(status)),
              where);
}

void fail_library(const char* library, const char* status, const char* call,
                  std::source_location where) {
  cudaGetLastError();
  throw Error(ErrorKind::kInternal,
              fmt::format("[{}] {} failed at {}:{}: {}", library, call, where.file_name(), where.line(),
                          status),
              where);
}

}  // namespace tessera::cuda
