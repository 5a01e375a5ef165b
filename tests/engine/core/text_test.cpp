#include "engine/core/text.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

namespace tessera {
namespace {

TEST(Text, IntegersAreConsumedWhole) {
  EXPECT_EQ(parse_integer("0"), 0);
  EXPECT_EQ(parse_integer("-12"), -12);
  EXPECT_EQ(parse_integer("+7"), 7);
  EXPECT_EQ(parse_integer("1_000_000"), 1000000);
  EXPECT_EQ(parse_integer("1e9"), 1000000000);
  EXPECT_EQ(parse_integer("2.5e3"), 2500);
  EXPECT_EQ(parse_integer("8.0"), 8);
  EXPECT_EQ(parse_integer("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_integer("-9223372036854775808"), std::numeric_limits<std::int64_t>::min());
  for (const char* bad : {"", "-", "+", " 1", "1 ", "1x", "0x10", "010", "1__0", "_1", "1_", "2.5", "1e-1", "1e30",
                          "9223372036854775808", "--1", "1e", ".", "e5", "1.2.3", "inf", "nan", "\xD9\xA1"}) {
    EXPECT_FALSE(parse_integer(bad).has_value()) << bad;
  }
}

TEST(Text, NumbersAreFiniteAndConsumedWhole) {
  EXPECT_EQ(parse_number("1e-4"), 1e-4);
  EXPECT_EQ(parse_number("-.5"), -0.5);
  EXPECT_EQ(parse_number("5."), 5.0);
  EXPECT_EQ(parse_number("1_000.25"), 1000.25);
  EXPECT_EQ(parse_number("0.1"), 0.1);
  EXPECT_EQ(parse_number("1E5"), 1e5);
  for (const char* bad : {"", ".", "e1", "1e", "1e+", "0x1p3", "inf", ".inf", "nan", "1e400", "1e-400", "1,5", "1 2",
                          "01.5", "1.5f"}) {
    EXPECT_FALSE(parse_number(bad).has_value()) << bad;
  }
}

TEST(Text, Durations) {
  EXPECT_EQ(parse_duration("90"), 90);
  EXPECT_EQ(parse_duration("90s"), 90);
  EXPECT_EQ(parse_duration("10m"), 600);
  EXPECT_EQ(parse_duration("1h30m"), 5400);
  EXPECT_EQ(parse_duration("1h 30min"), 5400);
  EXPECT_EQ(parse_duration("2d"), 172800);
  EXPECT_EQ(parse_duration("0.5h"), 1800);
  EXPECT_EQ(parse_duration("01:30:00"), 5400);
  EXPECT_EQ(parse_duration("1-12:00:00"), 129600);
  EXPECT_EQ(parse_duration("100:00:00"), 360000);
  for (const char* bad : {"", "m", "10x", "30m1h", "1h1h", "1h30", "-5m", "10:00", "1:60:00", "1-2-3:0:0", "::", "1::2"}) {
    EXPECT_FALSE(parse_duration(bad).has_value()) << bad;
  }
}

TEST(Text, Sizes) {
  EXPECT_EQ(parse_bytes("1024"), 1024);
  EXPECT_EQ(parse_bytes("512M"), 512ll << 20);
  EXPECT_EQ(parse_bytes("40GiB"), 40ll << 30);
  EXPECT_EQ(parse_bytes("40 GiB"), 40ll << 30);
  EXPECT_EQ(parse_bytes("1.5 GB"), 1500000000);
  EXPECT_EQ(parse_bytes("1kB"), 1000);
  EXPECT_EQ(parse_bytes("1k"), 1024);
  for (const char* bad : {"", "GiB", "-1G", "1X", "1GiBB", "1e40T", "99999999T"}) {
    EXPECT_FALSE(parse_bytes(bad).has_value()) << bad;
  }
}

TEST(Text, EditDistanceCountsSwapsOnce) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("tensor", "tensr"), 1u);
  EXPECT_EQ(edit_distance("stpes", "steps"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
}

TEST(Text, NearestName) {
  const std::vector<std::string> names = {"tensor", "pipeline", "warmup_steps", "zero"};
  EXPECT_EQ(nearest_name("tensr", names), "tensor");
  EXPECT_EQ(nearest_name("Tensor", names), "tensor");
  EXPECT_EQ(nearest_name("warmup-steps", names), "warmup_steps");
  EXPECT_EQ(nearest_name("warmup", names), "warmup_steps");
  EXPECT_EQ(nearest_name("quux", names), std::nullopt);
  EXPECT_EQ(nearest_name("", names), std::nullopt);
  EXPECT_EQ(nearest_name(std::string(1000, 'a'), names), std::nullopt);
}

TEST(Text, JoinsChoices) {
  EXPECT_EQ(join_choices({}), "");
  EXPECT_EQ(join_choices({"a"}), "a");
  EXPECT_EQ(join_choices({"a", "b"}), "a or b");
  EXPECT_EQ(join_choices({"a", "b", "c"}), "a, b or c");
}

TEST(Text, FindsInvalidUtf8) {
  for (const char* good : {"", "abc", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(find_invalid_utf8(good), std::string_view::npos) << good;
  }
  for (const char* bad : {"a\x80", "a\xC0\xAF", "a\xC3", "a\xE0\x80\xAF", "a\xED\xA0\x80", "a\xF4\x90\x80\x80",
                          "a\xF5\x80\x80\x80", "a\xFF", "a\xE2\x82"}) {
    EXPECT_EQ(find_invalid_utf8(bad), 1u) << bad;
  }
}

}  // namespace
}  // namespace tessera
