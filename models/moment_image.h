// MomentImage: a rank's 8-bit moments as a checkpoint holds them, in host memory. A code times its
// scale is a bf16 number, so the image is exact, knows no blocks and can be read by any layout; encoded
// again in the same blocks it gives the same codes. In other blocks a value keeps its code unless a far
// larger neighbour pushes it below what the block's scale reaches (kernels/moment_format.h).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core/numeric.h"
#include "parallel/param_store.h"

namespace tessera {

class MomentImage {
 public:
  // Takes 4 bytes of host memory for every element of the rank's shards. `params` outlives this.
  explicit MomentImage(const ParamStore& params);

  // What adam_m and adam_v of a shard hold: flat bf16 tensors in host memory.
  Tensor m(int b) const { return view(m_, b); }
  Tensor v(int b) const { return view(v_, b); }

  // Decodes the shards, behind the work enqueued on `stream`. Blocks.
  void read_shards(Stream& stream);
  // Encodes the image into the shards, rounding to nearest. Does nothing once an update has changed
  // the shards since read_shards: the image is then out of date. Blocks.
  void write_shards(Stream& stream);

 private:
  Tensor view(const std::vector<bf16>& values, int b) const;

  const ParamStore* params_;
  std::vector<std::int64_t> begins_;  // of each shard
  std::vector<bf16> m_;
  std::vector<bf16> v_;
  std::uint64_t version_ = 0;  // of the weights at read_shards
};

}  // namespace tessera
