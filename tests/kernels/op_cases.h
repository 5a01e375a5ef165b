// The list of op cases: each runs one op on the fixture's device and returns its outputs together
// with a plain fp64 reference of the same rounded inputs and the error that the arithmetic allows.
// The value tests, the repeat and thread-count tests and the comparison of backends all go through
// this one list.
//
// Bounds: u is half the distance between neighbours of a format at 1. Storing y rounds by u(dtype)
// |y|; a sum of k products in the compute type errs by about u sqrt(k) sum |products| when
// roundings are independent, which Bound::sum doubles. No bound is fitted to what an implementation
// happens to give.
#pragma once

#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/op_fixture.h"

namespace tessera::test {

struct OpOutput {
  std::string name;
  Values got;
  Values want;
  Values bound;
};

struct OpCase {
  std::string name;  // op/dtype/shape, letters and digits only
  DType dtype;
  std::function<std::vector<OpOutput>(OpFixture&)> run;
};
inline std::ostream& operator<<(std::ostream& out, const OpCase& c) { return out << c.name; }

// Error bounds of one element.
struct Bound {
  double stored;   // u of the dtype the result is rounded to
  double compute;  // u of the compute type

  static Bound of(DType output, DType operands) {
    return {epsilon_of(output) / 2,
            epsilon_of(operands == DType::kF64 ? DType::kF64 : DType::kF32) / 2};
  }
  // `y` stored after a sum of `k` terms of total magnitude `magnitude`.
  double sum(double y, std::int64_t k, double magnitude) const {
    return stored * std::abs(y) * (1 + 1e-6) +
           2 * compute * std::sqrt(static_cast<double>(k) + 4) * magnitude + tiny();
  }
  // `y` stored after `operations` roundings of relative size u in the compute type.
  double chain(double y, double operations) const {
    return (stored * (1 + 1e-6) + operations * compute) * std::abs(y) + tiny();
  }
  // Results near the smallest normal number may be flushed to zero.
  static double tiny() { return 1e-37; }
};

inline std::string dtype_tag(DType dtype) { return std::string(name_of(dtype)); }

inline const std::vector<DType>& float_types() {
  static const std::vector<DType> types{DType::kF64, DType::kF32, DType::kBF16};
  return types;
}
inline DType statistics_type(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// A cleared record of the largest magnitude, or none: fp64 has none.
inline Tensor amax_record(OpFixture& f, DType dtype) {
  return dtype == DType::kF64 ? Tensor{} : f.input({0}, DType::kF32, Shape{1});
}
// Appends the record's value against the values that were stored: exact.
inline void add_amax_output(OpFixture& f, const Tensor& record, const Tensor& stored,
                            std::vector<OpOutput>& outputs) {
  if (!record.defined()) return;
  double largest = 0;
  for (const double value : f.values(stored)) largest = std::max(largest, std::abs(value));
  outputs.push_back({"amax", f.values(record), {largest}, {0.0}});
}

}  // namespace tessera::test
