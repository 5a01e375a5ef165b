// Data that the project does not ship: found through the environment variable TESSERA_TEST_DATA.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::test {

// The path of `relative` under TESSERA_TEST_DATA; nothing if the variable is unset or the file is
// missing, in which case the test skips with a reason.
inline std::optional<std::filesystem::path> data_path(const std::string& relative) {
  const char* root = std::getenv("TESSERA_TEST_DATA");
  if (root == nullptr || *root == '\0') return std::nullopt;
  std::filesystem::path path = std::filesystem::path(root) / relative;
  if (!std::filesystem::exists(path)) return std::nullopt;
  return path;
}

}  // namespace tessera::test

// Skips the current test when `relative` is not there; otherwise declares `name` with its path.
#define TESSERA_REQUIRE_DATA(name, relative)                                                  \
  const auto name##_found = ::tessera::test::data_path(relative);                             \
  if (!name##_found) GTEST_SKIP() << "needs " << (relative) << " under $TESSERA_TEST_DATA";   \
  const std::filesystem::path name = *name##_found
