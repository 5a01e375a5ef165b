#include "kernels/check.h"

#include <cstdint>
#include <string>

namespace tessera {
namespace {

// Bytes from the first to one past the last element.
std::uint64_t span_bytes(const Tensor& t) {
  if (t.numel() == 0) return 0;
  const std::int64_t elements = (t.rows() - 1) * t.row_stride + t.cols();
  return static_cast<std::uint64_t>(elements) * size_of(t.dtype);
}

}  // namespace

bool overlaps(const Tensor& a, const Tensor& b) {
  if (a.data == nullptr || b.data == nullptr || a.numel() == 0 || b.numel() == 0) return false;
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a.data);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b.data);
  if (a_begin + span_bytes(a) <= b_begin || b_begin + span_bytes(b) <= a_begin) return false;
  // Rows of one common stride interleave without touching when their column ranges are disjoint.
  const std::uint64_t a_stride = static_cast<std::uint64_t>(a.row_stride) * size_of(a.dtype);
  const std::uint64_t b_stride = static_cast<std::uint64_t>(b.row_stride) * size_of(b.dtype);
  const std::uint64_t stride = a.rows() > 1 ? a_stride : b_stride;
  if ((a.rows() > 1 && b.rows() > 1 && a_stride != b_stride) || (a.rows() <= 1 && b.rows() <= 1)) {
    return true;
  }
  const std::uint64_t a_width = static_cast<std::uint64_t>(a.cols()) * size_of(a.dtype);
  const std::uint64_t b_width = static_cast<std::uint64_t>(b.cols()) * size_of(b.dtype);
  const std::uint64_t shift = b_begin >= a_begin ? (b_begin - a_begin) % stride
                                                 : (stride - (a_begin - b_begin) % stride) % stride;
  return shift < a_width || shift + b_width > stride;
}

bool is_same_view(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rows() == b.rows() && a.cols() == b.cols() &&
         (a.row_stride == b.row_stride || a.rows() <= 1);
}

void ArgumentCheck::defined(std::string_view name, const Tensor& tensor) {
  CHECK(tensor.defined(), "[{}] {} is missing", op_, name);
  for (int i = 0; i < tensor.shape.rank; ++i) {
    CHECK(tensor.shape.dims[i] >= 0, "[{}] {} is {}: a size is negative", op_, name,
          to_string(tensor.shape));
  }
  if (!has_device_) {
    device_ = tensor.device;
    first_name_ = name;
    has_device_ = true;
  }
  CHECK(tensor.device == device_, "[{}] {} is on {}, expected {} like {}", op_, name,
        to_string(tensor.device), to_string(device_), first_name_);
  CHECK(tensor.rows() <= 1 || tensor.row_stride >= tensor.cols(),
        "[{}] {} {} has row stride {}, expected at least {}", op_, name, to_string(tensor.shape),
        tensor.row_stride, tensor.cols());
  if (tensor.device.kind == DeviceKind::kMeta) return;
  CHECK(tensor.data != nullptr || tensor.numel() == 0, "[{}] {} {} has no memory", op_, name,
        to_string(tensor));
  CHECK(reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.dtype) == 0,
        "[{}] {} {} is not aligned to its elements", op_, name, to_string(tensor));
}

void ArgumentCheck::shape(std::string_view name, const Tensor& tensor, Shape expected,
                          std::string_view reference_name, const Tensor& reference) {
  defined(name, tensor);
  CHECK(tensor.shape == expected, "[{}] {} is {}, expected {} to match {} {}", op_, name,
        to_string(tensor.shape), to_string(expected), reference_name, to_string(reference.shape));
}

void ArgumentCheck::matrix(std::string_view name, const Tensor& tensor) {
  defined(name, tensor);
  CHECK(tensor.shape.rank == 2, "[{}] {} is {}, expected two dims", op_, name,
        to_string(tensor.shape));
}

void ArgumentCheck::dtype(std::string_view name, const Tensor& tensor,
                          std::initializer_list<DType> allowed) const {
  std::string choices;
  for (const DType candidate : allowed) {
    if (tensor.dtype == candidate) return;
    if (!choices.empty()) choices += " or ";
    choices += name_of(candidate);
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[{}] {} is {}, expected {}", op_, name, name_of(tensor.dtype),
               choices);
}

void ArgumentCheck::dense(std::string_view name, const Tensor& tensor) const {
  CHECK(tensor.is_dense(), "[{}] {} {} has row stride {}, expected dense rows ({})", op_, name,
        to_string(tensor.shape), tensor.row_stride, tensor.cols());
}

void ArgumentCheck::separate(std::string_view output_name, const Tensor& output,
                             std::string_view name, const Tensor& operand) const {
  if (!output.defined() || !operand.defined()) return;
  CHECK(!overlaps(output, operand), "[{}] {} shares memory with {}, expected separate memory", op_,
        output_name, name);
}

void ArgumentCheck::in_place_or_separate(std::string_view output_name, const Tensor& output,
                                         std::string_view name, const Tensor& operand) const {
  if (!output.defined() || !operand.defined()) return;
  CHECK(is_same_view(output, operand) || !overlaps(output, operand),
        "[{}] {} overlaps {} without being the same view, expected in place or separate memory",
        op_, output_name, name);
}

void ArgumentCheck::scalar(std::string_view name, const Tensor& tensor) {
  defined(name, tensor);
  CHECK(tensor.shape == Shape{1}, "[{}] {} is {}, expected [1]", op_, name,
        to_string(tensor.shape));
  dtype(name, tensor, {DType::kF32});
}

void ArgumentCheck::amax(const Tensor& amax, const Tensor& recorded) {
  if (!amax.defined()) return;
  scalar("amax", amax);
  CHECK(recorded.dtype != DType::kF64, "[{}] the amax of fp64 values is not recorded", op_);
}

void ArgumentCheck::require(bool condition, std::string_view what) const {
  CHECK(condition, "[{}] {}", op_, what);
}

}  // namespace tessera
