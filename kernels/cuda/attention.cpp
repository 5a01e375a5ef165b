// Which implementation of attention runs. Forward: cuDNN's fused kernels where they apply, the plain ones
// elsewhere. Backward: our kernels for Hopper; without them cuDNN's where its workspace is bounded, our
// tensor-core kernels for any GPU next, the plain ones elsewhere.
#include "kernels/cuda/attention_paths.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera::cuda {

void attention_forward(const AttentionForward& args, Stream& stream) {
  // At most one query per document is decoding, which has its own kernel.
  const bool is_decoding = args.q.rows() <= args.cu_q.numel() - 1;
  if (!is_decoding && cudnn_attention_forward(args, stream)) return;
  plain_attention_forward(args, stream);
}

void attention_backward(const AttentionBackward& args, Stream& stream) {
  if (library_attention_comes_first(args) && cudnn_attention_backward(args, stream)) return;
  if (wgmma_attention_backward(args, stream)) return;
  if (cudnn_attention_backward(args, stream) || mma_attention_backward(args, stream)) return;
  plain_attention_backward(args, stream);
}

}  // namespace tessera::cuda
