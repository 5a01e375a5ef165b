#include "engine/train/rehearsal.h"

#include <gtest/gtest.h>

#include "engine/core/error.h"

namespace tessera {
namespace {

TEST(Rehearsal, ReadsFaults) {
  const auto faults = parse_faults("throw@rank=1,step=3;slow@step=2,factor=1.3,rank=0");
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_EQ(faults[0].kind, FaultKind::kThrow);
  EXPECT_EQ(faults[0].rank, 1);
  EXPECT_EQ(faults[0].step, 3);
  EXPECT_EQ(faults[1].kind, FaultKind::kSlow);
  EXPECT_EQ(faults[1].rank, 0);
  EXPECT_EQ(faults[1].step, 2);
  EXPECT_EQ(faults[1].factor, 1.3);
  EXPECT_TRUE(parse_faults("").empty());
}

TEST(Rehearsal, RefusesOtherForms) {
  for (const char* text :
       {"throw", "boom@rank=1,step=1", "throw@rank=1", "kill@step=1", "kill@rank=-1,step=1", "kill@rank=0,step=0",
        "slow@rank=1,step=1", "slow@rank=1,step=1,factor=1", "kill@rank=1,step=1,factor=2", "kill@rank=x,step=1",
        "kill@rank=1,rank=1,step=1", ";"}) {
    EXPECT_THROW(parse_faults(text), Error) << text;
  }
}

}  // namespace
}  // namespace tessera
