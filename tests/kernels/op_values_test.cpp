// Every op case on the CPU and, where there is one, on a GPU.
#include <gtest/gtest.h>

#include "tests/kernels/cases/all_cases.h"

namespace tessera::test {
namespace {

void expect_outputs(const std::vector<OpOutput>& outputs) {
  ASSERT_FALSE(outputs.empty());
  for (const OpOutput& out : outputs) {
    ASSERT_FALSE(out.got.empty()) << out.name;
    expect_close(out.name, out.got, out.want, out.bound);
  }
}

void expect_same(const std::vector<OpOutput>& a, const std::vector<OpOutput>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) expect_bitwise(a[i].name, a[i].got, b[i].got);
}

std::string case_name(const ::testing::TestParamInfo<OpCase>& info) { return info.param.name; }

class OpValues : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpValues, MatchReference) {
  OpFixture fixture;
  expect_outputs(GetParam().run(fixture));
}

TEST_P(OpValues, DoNotDependOnThreadsOrWorkerStreams) {
  OpFixture one, three(Device{}, 3, false);
  expect_same(GetParam().run(one), GetParam().run(three));
}

INSTANTIATE_TEST_SUITE_P(Cpu, OpValues, ::testing::ValuesIn(all_op_cases()), case_name);

// The same cases on a GPU against the reference and bit for bit against themselves. fp64 exists for the
// CPU's gradient checks only.
class OpParity : public ::testing::TestWithParam<OpCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpParity);

std::vector<OpCase> gpu_cases() {
  std::vector<OpCase> cases;
  if (cuda_device_count() == 0) return cases;
  for (OpCase& c : all_op_cases()) {
    if (c.dtype != DType::kF64) cases.push_back(std::move(c));
  }
  return cases;
}

TEST_P(OpParity, CudaMatchesReference) {
  OpFixture fixture(Device{DeviceKind::kCuda, 0});
  expect_outputs(GetParam().run(fixture));
}

TEST_P(OpParity, CudaRepeatsBitForBit) {
  OpFixture first(Device{DeviceKind::kCuda, 0}), second(Device{DeviceKind::kCuda, 0});
  expect_same(GetParam().run(first), GetParam().run(second));
}

INSTANTIATE_TEST_SUITE_P(Cuda, OpParity, ::testing::ValuesIn(gpu_cases()), case_name);

TEST(OpParityList, HasCasesWhereThereIsAGpu) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device: the GPU cases were left out";
  EXPECT_GT(gpu_cases().size(), 100u);
}

}  // namespace
}  // namespace tessera::test
