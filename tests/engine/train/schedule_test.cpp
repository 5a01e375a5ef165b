#include "engine/train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/core/error.h"

namespace tessera {
namespace {

LearningRateSchedule schedule(const char* name, std::int64_t warmup, std::int64_t total, double min_ratio = 0.1,
                              std::optional<std::int64_t> decay = std::nullopt, double peak = 1.0) {
  OptimizerOptions optimizer;
  optimizer.learning_rate = peak;
  ScheduleOptions options;
  options.name = name;
  options.warmup_steps = warmup;
  options.min_lr_ratio = min_ratio;
  options.decay_steps = decay;
  return make_schedule(optimizer, options, total);
}

// Failure kind B29: warm-up 5, 20 steps, peak 1, cosine to 0.1; rates by the formula, by hand.
TEST(Schedule, CosineFollowsTheDocumentedFormula) {
  const auto s = schedule("cosine", 5, 20);
  const double warmup[] = {0.2, 0.4, 0.6, 0.8, 1.0};
  for (int i = 0; i < 5; ++i) EXPECT_DOUBLE_EQ(s.rate(i + 1), warmup[i]);
  for (int step = 6; step < 20; ++step) {
    EXPECT_NEAR(s.rate(step), 0.1 + 0.45 * (1 + std::cos(M_PI * (step - 5) / 15.0)), 1e-15);
  }
  EXPECT_NEAR(s.rate(10), 0.775, 1e-15);  // a third of the way: cos 60 degrees
  EXPECT_EQ(s.rate(20), 0.1);
}

TEST(Schedule, PeakIsReachedOnceAndTheLastStepHasTheMinimum) {
  for (const char* name : {"cosine", "linear"}) {
    for (const std::int64_t warmup : {0, 1, 2, 5, 18, 19}) {
      for (const double peak : {1.0, 3e-4, 0.1}) {
        const auto s = schedule(name, warmup, 20, 0.1, std::nullopt, peak);
        int peaks = 0;
        for (int step = 1; step <= 20; ++step) {
          const double rate = s.rate(step);
          EXPECT_GT(rate, 0) << name << warmup << " " << step;
          EXPECT_LE(rate, peak);
          peaks += rate == peak;
          if (step > 1) {
            EXPECT_NE(rate, s.rate(step - 1)) << "a value is repeated at " << step;
          }
        }
        EXPECT_EQ(peaks, 1) << name << warmup;
        EXPECT_EQ(s.rate(std::max<std::int64_t>(warmup, 1)), peak);
        EXPECT_EQ(s.rate(20), peak * 0.1);
      }
    }
  }
}

TEST(Schedule, ShortRunsDivideByNothing) {
  for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
    EXPECT_EQ(schedule(name, 0, 1).rate(1), 1.0) << name;  // no step behind the peak
    EXPECT_EQ(schedule(name, 1, 1).rate(1), 1.0) << name;
    EXPECT_EQ(schedule(name, 5, 5).rate(5), 1.0) << name;
    EXPECT_EQ(schedule(name, 0, 2).rate(1), 1.0) << name;
    EXPECT_EQ(schedule(name, 0, 2).rate(2), std::string(name) == "constant" ? 1.0 : 0.1) << name;
  }
}

TEST(Schedule, LinearFallsInEqualSteps) {
  const auto s = schedule("linear", 2, 12, 0.0);
  for (int step = 2; step < 12; ++step) {
    EXPECT_NEAR(s.rate(step) - s.rate(step + 1), 0.1, 1e-15);
  }
  EXPECT_EQ(s.rate(12), 0.0);
}

TEST(Schedule, ConstantStaysAtThePeak) {
  const auto s = schedule("constant", 4, 10, 0.0);
  EXPECT_EQ(s.rate(1), 0.25);
  for (int step = 4; step <= 10; ++step) EXPECT_EQ(s.rate(step), 1.0);
}

TEST(Schedule, WsdHoldsThePeakAndDecaysAtTheEnd) {
  const auto s = schedule("wsd", 10, 100, 0.0, 20);
  EXPECT_EQ(s.rate(10), 1.0);
  EXPECT_EQ(s.rate(80), 1.0);
  EXPECT_NEAR(s.rate(81), 0.95, 1e-15);
  EXPECT_NEAR(s.rate(90), 0.5, 1e-15);
  EXPECT_EQ(s.rate(100), 0.0);
  // Unset: the last tenth.
  const auto tenth = schedule("wsd", 10, 100, 0.0);
  EXPECT_EQ(tenth.rate(90), 1.0);
  EXPECT_LT(tenth.rate(91), 1.0);
  // A warm-up that leaves less than a tenth gets what is left.
  const auto squeezed = schedule("wsd", 95, 100, 0.0);
  EXPECT_EQ(squeezed.rate(95), 1.0);
  EXPECT_EQ(squeezed.rate(100), 0.0);
}

TEST(Schedule, DecayStepsOfCosineAndLinearEndEarlyAndHoldTheMinimum) {
  const auto s = schedule("cosine", 5, 100, 0.1, 20);
  EXPECT_GT(s.rate(24), 0.1);
  for (const int step : {25, 26, 99, 100}) EXPECT_EQ(s.rate(step), 0.1);
}

TEST(Schedule, StepsPastTheEndKeepTheLastRate) {
  EXPECT_EQ(schedule("cosine", 5, 20).rate(1000), 0.1);
  EXPECT_EQ(schedule("constant", 0, 20).rate(1000), 1.0);
}

TEST(Schedule, WarmupRatioIsRoundedUp) {
  OptimizerOptions optimizer;
  optimizer.learning_rate = 1.0;
  ScheduleOptions options;
  auto warmup = [&](double ratio, std::int64_t total) {
    options.warmup_ratio = ratio;
    return make_schedule(optimizer, options, total).warmup_steps;
  };
  EXPECT_EQ(warmup(0.03, 100), 3);
  EXPECT_EQ(warmup(0.07, 100), 7);  // 0.07 * 100 is 7.000000000000001
  EXPECT_EQ(warmup(0.03, 101), 4);
  EXPECT_EQ(warmup(0.0, 100), 0);
  EXPECT_EQ(warmup(0.001, 10), 1);
  EXPECT_EQ(warmup(1.0, 10), 10);
}

TEST(Schedule, ImpossibleLengthsAreUserErrors) {
  for (const auto& make : {+[] { schedule("cosine", 21, 20); }, +[] { schedule("wsd", 5, 20, 0.1, 16); }}) {
    try {
      make();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      EXPECT_EQ(std::string(error.what()).substr(0, 11), "[schedule] ");
    }
  }
  EXPECT_THROW(schedule("cosine", 5, 20).rate(0), Error);
}

}  // namespace
}  // namespace tessera
