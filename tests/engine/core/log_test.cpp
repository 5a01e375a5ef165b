#include "engine/core/log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "engine/core/error.h"

namespace tessera {
namespace {

class Log : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / "tessera_log_test.txt";
    std::filesystem::remove(path_);
    log::set_console(false);
    log::set_file(path_.string());
  }
  void TearDown() override {
    log::close_file();
    log::set_level(log::Level::kInfo);
    log::set_console(true);
    std::filesystem::remove(path_);
  }

  std::vector<std::string> lines() const {
    std::ifstream stream(path_);
    std::vector<std::string> result;
    for (std::string line; std::getline(stream, line);) result.push_back(line);
    return result;
  }

  std::filesystem::path path_;
};

TEST_F(Log, LinesCarryTimeLevelAndRank) {
  log::info("loss {:.2f}", 1.5);
  std::thread([] {
    log::set_thread_rank(3);
    log::warning("slow");
  }).join();
  const auto got = lines();
  ASSERT_EQ(got.size(), 2u);
  const std::string time = R"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )";
  EXPECT_TRUE(std::regex_match(got[0], std::regex(time + "info: loss 1\\.50"))) << got[0];
  EXPECT_TRUE(std::regex_match(got[1], std::regex(time + "warning rank 3: slow"))) << got[1];
}

TEST_F(Log, LevelsBelowTheThresholdAreDropped) {
  log::debug("hidden");
  log::set_level(log::Level::kError);
  log::warning("hidden");
  log::error("shown");
  EXPECT_EQ(lines().size(), 1u);
  log::set_level(log::Level::kDebug);
  log::debug("shown");
  EXPECT_EQ(lines().size(), 2u);
}

TEST_F(Log, ReopeningAppends) {
  log::info("one");
  log::close_file();
  log::info("nowhere");
  log::set_file(path_.string());
  log::info("two");
  EXPECT_EQ(lines().size(), 2u);
}

TEST_F(Log, ThreadsWriteWholeLines) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      log::set_thread_rank(t);
      for (int i = 0; i < 200; ++i) log::info("message {} of {}", i, t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto got = lines();
  EXPECT_EQ(got.size(), 800u);
  const std::regex whole(R"(\S+ \S+ info rank \d: message \d+ of \d)");
  for (const std::string& line : got) ASSERT_TRUE(std::regex_match(line, whole)) << line;
}

TEST_F(Log, AFileThatCannotBeOpenedIsATransientError) {
  try {
    log::set_file("/no/such/folder/log.txt");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTransient);
    EXPECT_STREQ(error.what(), "[log] cannot open /no/such/folder/log.txt for appending");
  }
  log::info("the old file is still in use");
  EXPECT_EQ(lines().size(), 1u);
}

}  // namespace
}  // namespace tessera
