#include "engine/train/config_reference.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera {
namespace {

constexpr std::string_view kBegin = "<!-- keys: begin -->\n";
constexpr std::string_view kEnd = "<!-- keys: end -->\n";

TEST(ConfigReference, DocumentHoldsEveryKeyAsListed) {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../../docs/configuration.md";
  std::ifstream stream(path);
  ASSERT_TRUE(stream.good()) << path;
  std::stringstream buffer;
  buffer << stream.rdbuf();
  std::string document = buffer.str();
  const std::size_t begin = document.find(kBegin);
  const std::size_t end = document.find(kEnd);
  ASSERT_NE(begin, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const std::string expected = configuration_reference();
  const std::size_t first = begin + kBegin.size();
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    document.replace(first, end - first, expected);
    std::ofstream(path) << document;
    return;
  }
  EXPECT_EQ(document.substr(first, end - first), expected)
      << "docs/configuration.md is not what the visit lists say; set TESSERA_UPDATE_DOCS=1 to rewrite it";
}

TEST(ConfigReference, EveryKeyHasAMeaning) {
  std::stringstream lines(configuration_reference());
  int rows = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| `")) continue;
    ++rows;
    // Five bars that are not escaped: four cells.
    int bars = 0;
    for (std::size_t i = 0; i < line.size(); ++i) bars += line[i] == '|' && (i == 0 || line[i - 1] != '\\');
    EXPECT_EQ(bars, 5) << line;
    EXPECT_EQ(line.find("|  |\n"), std::string::npos);
    EXPECT_EQ(line.find(".. "), std::string::npos) << line;
  }
  EXPECT_GT(rows, 60);
}

}  // namespace
}  // namespace tessera
