// ArgumentCheck: the argument checks that all ops share. Every failure is an internal error of the
// form
// "[rmsnorm_forward] weight is [4096], expected [2048] to match x [8192, 2048]".
#pragma once

#include <initializer_list>
#include <string_view>

#include "engine/core/tensor.h"

namespace tessera {

// True when some element of `a` shares memory with some element of `b`. Column ranges of one
// strided matrix (the q, k and v parts of a packed projection) do not overlap.
bool overlaps(const Tensor& a, const Tensor& b);
// True when both are the same elements in the same places (an in-place operation).
bool is_same_view(const Tensor& a, const Tensor& b);

class ArgumentCheck {
 public:
  explicit ArgumentCheck(std::string_view op) : op_(op) {}

  // `tensor` is defined, lies on the device of the tensors checked before, has memory aligned to
  // its elements and rows that do not overlap.
  void defined(std::string_view name, const Tensor& tensor);
  // defined() and exactly this shape; `reference` explains where it comes from ("x").
  void shape(std::string_view name, const Tensor& tensor, Shape expected,
             std::string_view reference_name, const Tensor& reference);
  // defined(), rank 2.
  void matrix(std::string_view name, const Tensor& tensor);

  void dtype(std::string_view name, const Tensor& tensor,
             std::initializer_list<DType> allowed) const;
  void dense(std::string_view name, const Tensor& tensor) const;
  // An output must not overlap this operand at all.
  void separate(std::string_view output_name, const Tensor& output, std::string_view name,
                const Tensor& operand) const;
  // An output may be exactly this operand, otherwise must not overlap it.
  void in_place_or_separate(std::string_view output_name, const Tensor& output,
                            std::string_view name, const Tensor& operand) const;
  // defined(), [1] fp32.
  void scalar(std::string_view name, const Tensor& tensor);
  // An optional record of the largest |value| of `recorded`: [1] fp32 beside bf16 or fp32.
  void amax(const Tensor& amax, const Tensor& recorded);
  // Throws "[op] what" when `condition` does not hold.
  void require(bool condition, std::string_view what) const;

  std::string_view op() const { return op_; }

 private:
  std::string_view op_;
  std::string_view first_name_;
  Device device_;
  bool has_device_ = false;
};

// fp64 for fp64, fp32 otherwise: the type of statistics and accumulators beside tensors of `dtype`.
constexpr DType compute_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

}  // namespace tessera
