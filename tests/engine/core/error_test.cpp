#include "engine/core/error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Error, KindsHaveTheDocumentedExitCodes) {
  EXPECT_EQ(exit_code(ErrorKind::kAnswerNo), 1);
  EXPECT_EQ(exit_code(ErrorKind::kUser), 2);
  EXPECT_EQ(exit_code(ErrorKind::kInternal), 3);
  EXPECT_EQ(exit_code(ErrorKind::kTransient), 4);
}

template <typename Action>
Error caught(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kAnswerNo, "");
}

TEST(Error, ChecksThrowWithKindMessageAndPlace) {
  const Error internal = caught([] { CHECK(1 + 1 == 3, "[sum] got {}, wanted {}", 2, 3); });
  EXPECT_EQ(internal.kind(), ErrorKind::kInternal);
  EXPECT_STREQ(internal.what(), "[sum] got 2, wanted 3");
  EXPECT_NE(std::string(internal.where().file_name()).find("error_test.cpp"), std::string::npos);
  EXPECT_GT(internal.where().line(), 0u);

  EXPECT_EQ(caught([] { CHECK_USER(false, "x"); }).kind(), ErrorKind::kUser);
  EXPECT_EQ(caught([] { TESSERA_FAIL(ErrorKind::kTransient, "disk {}", "full"); }).kind(), ErrorKind::kTransient);
}

TEST(Error, ConditionsAreEvaluatedOnceAndMessagesOnlyOnFailure) {
  int conditions = 0;
  int messages = 0;
  CHECK(++conditions > 0, "{}", ++messages);
  EXPECT_EQ(conditions, 1);
  EXPECT_EQ(messages, 0);
  if (conditions == 1)
    CHECK_USER(true, "a check is one statement");
  else
    ADD_FAILURE();
}

}  // namespace
}  // namespace tessera
