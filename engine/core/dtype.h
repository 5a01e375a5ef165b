// Element types of tensors. Names follow safetensors where it has one.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

enum class DType : unsigned char {
  kF64,
  kF32,
  kBF16,
  kF16,
  kF8E4M3,  // OCP FP8 E4M3 (finite, max 448)
  kF8E5M2,  // OCP FP8 E5M2 (max finite 57344)
  kI64,
  kI32,
  kU8,
};

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype != DType::kI64 && dtype != DType::kI32 && dtype != DType::kU8;
}

// "fp32", "bf16", ...: the spelling used in configurations and messages.
std::string_view name_of(DType dtype);

// Distance between 1 and the next larger number of the format; 0 for integers.
double epsilon_of(DType dtype);

}  // namespace tessera
