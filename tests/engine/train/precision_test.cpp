// Which FP8 recipes a run may ask for, and what it is told about them.
#include "engine/train/precision.h"

#include <gtest/gtest.h>

#include "engine/train/availability.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

TEST(Precision, RecipesNeedTheGpusThatMultiplyThem) {
  RunConfig config;
  Capabilities target;
  target.target = DeviceKind::kCuda;
  const auto check_on = [&](const char* fp8, int arch) {
    config.precision.fp8 = fp8;
    target.sm_arch = arch;
    check_precision(config, target);
  };
  EXPECT_NO_THROW(check_on("none", 80));
  EXPECT_NO_THROW(check_on("current", 89));
  EXPECT_NO_THROW(check_on("current", 90));
  EXPECT_NO_THROW(check_on("blockwise", 90));
  expect_error(ErrorKind::kUser,
               {"capability 8.9 or newer, this one has 8.0", "precision.fp8: none"},
               [&] { check_on("blockwise", 80); });
  for (const int arch : {89, 100}) {
    expect_error(ErrorKind::kUser,
                 {"precision.fp8", "is blockwise", "capability 9.0", "precision.fp8: current"},
                 [&] { check_on("blockwise", arch); });
  }
  target.target = DeviceKind::kCpu;
  EXPECT_NO_THROW(check_precision(config, target));
}

TEST(Precision, ConfigurationNamesTheRecipe) {
  PrecisionOptions options;
  EXPECT_EQ(quant_recipe(options).scaling, QuantScaling::kNone);
  options.fp8 = "current";
  EXPECT_EQ(quant_recipe(options).scaling, QuantScaling::kCurrent);
  options.fp8 = "blockwise";
  options.fp8_gradients = "e4m3";
  EXPECT_EQ(quant_recipe(options).scaling, QuantScaling::kBlockwise);
  EXPECT_EQ(quant_recipe(options).gradient, DType::kF8E4M3);
  for (const char* value : {"none", "current", "blockwise"})
    EXPECT_FALSE(is_unavailable("precision.fp8", value)) << value;
  for (const char* value : {"delayed", "rowwise"})
    EXPECT_TRUE(is_unavailable("precision.fp8", value)) << value;
}

}  // namespace
}  // namespace tessera::test
