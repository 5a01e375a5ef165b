// The kind and the wording of an Error: a message must name what the user has to look at.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

#include "engine/core/error.h"

namespace tessera::test {

// Runs `action`, expects an Error of `kind` whose text holds each of `parts`; returns the text.
inline std::string expect_error(ErrorKind kind, std::initializer_list<std::string_view> parts,
                                const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.kind(), kind) << text;
    for (const std::string_view part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
    }
    return text;
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

}  // namespace tessera::test
