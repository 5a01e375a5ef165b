// The cache of prepared data: nothing is done twice, by one process or many, and a killed
// preparation goes on where it was.
#include "data/prepare.h"

#include <csignal>
#include <cstdlib>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "data/job_lock.h"
#include "data/shards.h"
#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::DataTest;

class Prepare : public DataTest {
 protected:
  // Every shard that was tokenised is noted in order.
  PreparedData prepare_noting(std::vector<std::string>& phases) {
    PrepareSettings noting = settings;
    noting.progress = [&](const PrepareProgress& progress) {
      if (progress.phase.starts_with("waiting")) return;
      const std::string name = progress.phase.substr(0, progress.phase.find(' ') + 1) +
                               fs::path(progress.phase).filename().string();
      if (phases.empty() || phases.back() != name) phases.push_back(name);
    };
    return prepare_data(options, noting);
  }

  // A JSON file above the size at which files are gathered.
  void write_large(const std::string& name) {
    std::string bytes;
    for (int i = 0; bytes.size() < (std::size_t{9} << 20); ++i) {
      bytes += "{\"text\":\"" + name + std::to_string(i) + std::string(1000, 'x') + "\"}\n";
    }
    write("corpus/" + name, bytes);
  }

  std::map<std::string, std::string> cache_contents(const std::string& folder) {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::directory_iterator(fs::path(options.cache_dir) / folder)) {
      contents[entry.path().filename().string()] = read_small_file(entry.path());
    }
    return contents;
  }
};

TEST_F(Prepare, NothingIsDoneTwice) {
  add_source(write("a.jsonl", "{\"text\":\"one\"}\n"));
  std::vector<std::string> phases;
  prepare_noting(phases);
  EXPECT_EQ(phases, std::vector<std::string>({"tokenising a.jsonl", "packing a.jsonl"}));
  phases.clear();
  prepare_noting(phases);
  EXPECT_TRUE(phases.empty());
  // Another length packs anew and does not tokenise.
  settings.sequence_length = 8;
  prepare_noting(phases);
  EXPECT_EQ(phases, std::vector<std::string>({"packing a.jsonl"}));
  // Another tokenizer, another file of the same name and size, a file touched: all anew.
  phases.clear();
  encoder.fingerprint = "another tokenizer";
  prepare_noting(phases);
  EXPECT_EQ(phases.size(), 2u);
  phases.clear();
  write("a.jsonl", "{\"text\":\"two\"}\n");
  EXPECT_EQ(prepare_noting(phases).train->num_rows(), 1);
  EXPECT_EQ(phases.size(), 2u);
}

TEST_F(Prepare, AnAddedFileLeavesTheOthers) {
  for (const char* name : {"b.jsonl", "c.jsonl"}) write_large(name);
  add_source((scratch.path() / "corpus").string());
  std::vector<std::string> phases;
  prepare_noting(phases);
  phases.clear();
  write_large("a.jsonl");
  prepare_noting(phases);
  EXPECT_EQ(phases, std::vector<std::string>({"tokenising a.jsonl", "packing corpus"}));
}

TEST_F(Prepare, KilledInTheMiddleItGoesOn) {
  for (const char* name : {"a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"}) write_large(name);
  add_source((scratch.path() / "corpus").string());
  options.eval_fraction = 0.1;
  // The undisturbed preparation, in a cache of its own.
  const std::string cache = options.cache_dir;
  options.cache_dir = cache + "-whole";
  prepare();
  const auto whole_rows = cache_contents("rows");
  const auto whole_tokens = cache_contents("tokens");

  options.cache_dir = cache;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    PrepareSettings dying = settings;
    dying.progress = [](const PrepareProgress& progress) {
      // Some way into the third file.
      if (progress.phase.ends_with("c.jsonl") && progress.done > (std::int64_t{19} << 20)) {
        ::kill(::getpid(), SIGKILL);
      }
      // Slow enough for the time between two reports.
      std::this_thread::sleep_for(std::chrono::milliseconds(220));
    };
    prepare_data(options, dying);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the child was to be killed while tokenising";

  std::vector<std::string> phases;
  prepare_noting(phases);
  EXPECT_EQ(phases, std::vector<std::string>(
                        {"tokenising c.jsonl", "tokenising d.jsonl", "packing corpus"}));
  EXPECT_EQ(cache_contents("rows"), whole_rows);
  EXPECT_EQ(cache_contents("tokens"), whole_tokens);  // and no leftovers of the dead
}

TEST_F(Prepare, ThreadsAndProcessesShareTheWork) {
  for (const char* name : {"a.jsonl", "b.jsonl"}) write_large(name);
  add_source((scratch.path() / "corpus").string());
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // Each process: four ranks as threads. The exit code is the number of shards made.
      std::mutex mutex;
      int made = 0;
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < 4; ++rank) {
        ranks.emplace_back([&] {
          std::vector<std::string> phases;
          const PreparedData data = prepare_noting(phases);
          const std::lock_guard lock(mutex);
          made += static_cast<int>(phases.size());
          if (data.train->num_rows() == 0) made += 100;
        });
      }
      for (std::thread& rank : ranks) rank.join();
      ::_exit(made);
    }
    children.push_back(child);
  }
  int made = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    made += WEXITSTATUS(status);
  }
  EXPECT_EQ(made, 3);  // two files and the rows, once in all
}

TEST_F(Prepare, ADamagedCacheIsMadeAnew) {
  add_source(write("a.jsonl", "{\"text\":\"one two three\"}\n"));
  const auto rows = test::all_rows(*prepare().train);
  const auto tokens = cache_contents("tokens");
  for (const char* folder : {"tokens", "rows"}) {
    for (const auto& entry : fs::directory_iterator(fs::path(options.cache_dir) / folder)) {
      fs::resize_file(entry.path(), fs::file_size(entry.path()) / 2);
    }
  }
  const auto again = test::all_rows(*prepare().train);
  EXPECT_EQ(again[0].inputs, rows[0].inputs);
  EXPECT_EQ(cache_contents("tokens"), tokens);
}

TEST_F(Prepare, AFullDiskIsSaidToBeOne) {
  std::string bytes;
  for (int i = 0; i < 300; ++i) bytes += "{\"text\":\"" + std::string(10000, 'x') + "\"}\n";
  add_source(write("a.jsonl", bytes));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      prepare();
    } catch (const Error& error) {
      const bool named = std::string(error.what()).find("data.cache_dir") != std::string::npos;
      ::_exit(error.kind() == ErrorKind::kTransient && named ? 4 : 2);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 4);
  // Nothing half-written is taken for a store.
  EXPECT_EQ(prepare().train->sources()[0].rows->counts().target_tokens, 300 * 10000);
}

TEST_F(Prepare, AnImpossibleCacheFolderIsNamed) {
  options.cache_dir = write("file", "x") + "/cache";
  EXPECT_NE(error_of_file("a.txt", "some text").find("set data.cache_dir"), std::string::npos);
  // Without a choice of the user, the fallback takes its place.
  options.cache_dir.clear();
  settings.fallback_cache_dir = scratch.path() / "run" / "cache";
  ::setenv("XDG_CACHE_HOME", (scratch.path() / "file" / "home").c_str(), 1);
  EXPECT_EQ(prepare().train->num_rows(), 1);
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_TRUE(fs::exists(scratch.path() / "run" / "cache" / "rows"));
}

TEST_F(Prepare, ManySmallFilesBecomeFewStores) {
  for (int i = 0; i < 500; ++i) {
    write("corpus/" + std::to_string(1000 + i) + ".txt", "text number " + std::to_string(i));
  }
  add_source((scratch.path() / "corpus").string());
  const PreparedData data = prepare();
  EXPECT_EQ(data.train->sources()[0].documents->num_documents(), 500);
  EXPECT_LT(data.train->sources()[0].documents->parts().size(), 5u);
  // Provenance still names the file.
  std::set<std::string> lines;
  for (std::int64_t row = 0; row < data.train->num_rows(); ++row) {
    for (const auto& line : data.train->describe_row(row)) lines.insert(line);
  }
  const std::string file = (fs::canonical(scratch.path()) / "corpus" / "1321.txt").string();
  EXPECT_EQ(lines.count(file + " record 0 tokens 0-14"), 1u);
}

TEST_F(Prepare, CutsOfSmallFilesMeetAgain) {
  // Files of 1 MiB: where a shard ends depends on its files, so most shards outlive an added file.
  std::vector<SourceFile> files;
  for (int i = 0; i < 200; ++i) {
    SourceFile file;
    file.path = write("f/" + std::to_string(1000 + i) + ".txt", std::to_string(i));
    file.bytes = 1 << 20;
    files.push_back(file);
  }
  std::set<std::string> before;
  for (const auto& shard : cut_into_shards(files)) before.insert(shard.key);
  SourceFile added = files[0];
  added.path = write("f/0000.txt", "new");
  files.insert(files.begin(), added);
  int anew = 0, shards = 0;
  for (const auto& shard : cut_into_shards(files)) {
    ++shards;
    anew += before.count(shard.key) == 0 ? 1 : 0;
  }
  EXPECT_GT(shards, 6);
  EXPECT_LE(anew, 3);
}

TEST_F(Prepare, ReportSaysWhatBecameOfTheRecords) {
  options.bad_rows = "skip";
  add_source(write("a.jsonl", "{\"text\":\"short\"}\n{\"text\":\"\"}\nbroken\n{\"text\":\"" +
                                  std::string(40, 'x') + "\"}\n{\"input_ids\":[5]}\n"));
  const PreparedData data = prepare();
  ASSERT_EQ(data.report.size(), 2u);
  EXPECT_NE(
      data.report[0].find("1 file, 5 records, 48 tokens; 1 empty left out; 1 unreadable skipped, "
                          "the first"),
      std::string::npos)
      << data.report[0];
  EXPECT_NE(
      data.report[1].find("3 rows of 16, 45 target tokens, 93.8% full; 1 long record split; 1 "
                          "shorter than two tokens"),
      std::string::npos)
      << data.report[1];
}

TEST_F(Prepare, LeftoversOfTheDeadAreRemoved) {
  const fs::path folder = scratch.path() / "left";
  fs::create_directories(folder);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    AtomicFile file(folder / "x.tokens");
    file.write("abc");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  AtomicFile alive(folder / "y.tokens");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);
  remove_abandoned_files(folder);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1);
  alive.commit();
  EXPECT_TRUE(fs::exists(folder / "y.tokens"));
}

}  // namespace
}  // namespace tessera
