#include "models/layer_context.h"

#include "kernels/ops.h"

namespace tessera {

void measure(const GemmOperand& operand, LayerContext& context) {
  const Tensor record = amax_to_record(operand, context);
  if (record.defined()) amax(Amax{operand.plain, record}, context.stream);
}

}  // namespace tessera
