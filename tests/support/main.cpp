#include <gtest/gtest.h>

#include <cstdlib>

namespace {

// A share of the tests is this process's alone: ranks that a test starts as processes run theirs whole.
class KeepShareFromChildren : public ::testing::Environment {
 public:
  void SetUp() override {
    unsetenv("GTEST_TOTAL_SHARDS");
    unsetenv("GTEST_SHARD_INDEX");
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::AddGlobalTestEnvironment(new KeepShareFromChildren);  // gtest deletes it
  return RUN_ALL_TESTS();
}
