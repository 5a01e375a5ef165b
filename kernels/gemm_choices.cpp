#include "kernels/gemm_choices.h"

namespace tessera {

std::string export_gemm_choices(BackendContext& context) {
  return context.device().kind == DeviceKind::kCuda ? cuda::export_gemm_choices(context) : std::string();
}

int import_gemm_choices(BackendContext& context, const std::string& text) {
  if (text.empty() || context.device().kind != DeviceKind::kCuda) return 0;
  return cuda::import_gemm_choices(context, text);
}

}  // namespace tessera
