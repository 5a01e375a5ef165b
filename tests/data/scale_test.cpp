// What must not grow with the data: memory of preparation, and the way to a late step.
#include <atomic>
#include <sstream>
#include <thread>

#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

using test::DataTest;

class Scale : public DataTest {
 protected:
  // Memory of this process that is not backed by files, in MiB.
  static std::int64_t own_memory() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) / 1024;
    }
    return -1;
  }
};

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(Scale, MemoryOfPreparationDoesNotGrowWithItsFiles) {
  settings.sequence_length = 2048;
  // The most that was held while `megabytes` of lines, of one array and of one text were prepared.
  const auto peak_of = [&](int megabytes) {
    const std::string filler(900, 'x');
    const std::string name = std::to_string(megabytes);
    std::string names[] = {name + ".jsonl", name + ".json", name + ".txt"};
    for (std::string& file : names) {
      file = (scratch.path() / file).string();
      const bool is_array = file.ends_with(".json");
      std::ofstream out(file);
      for (int i = 0; i < megabytes * 1000; ++i) {
        if (is_array) out << (i == 0 ? "[" : ",");
        out << "{\"text\":\"" << i << ' ' << filler << "\"}\n";
      }
      if (is_array) out << "]";
    }
    std::atomic<std::int64_t> peak{0};
    std::jthread sampler([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        peak = std::max(peak.load(), own_memory());
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    for (const std::string& file : names) {
      options.train.clear();
      add_source(file);
      EXPECT_GT(prepare().train->num_rows(), megabytes * 400);
    }
    sampler.request_stop();
    sampler.join();
    return peak.load();
  };
  ASSERT_GE(own_memory(), 0);
  // Held, the ids alone of sixty megabytes more would take 240. The allocator keeps some of what
  // short-lived threads freed.
  const std::int64_t few = peak_of(20);
  EXPECT_LT(peak_of(80), few + 100) << "MiB; " << few << " for a quarter of the data";
}
#endif

// Were the way there walked, this would not end.
TEST_F(Scale, AnyStepIsReachedAtOnce) {
  settings.vocab_size = 1000;
  add_source("synthetic:1000000x8-40");
  const auto data = prepare().train;
  constexpr std::int64_t kStep = 1'000'000'000'000;
  DataLoader whole(data, {.micro_batch_size = 8, .seed = 5, .prefetch = 0});
  const std::vector<std::int64_t> rows = whole.rows_of_step(kStep);
  EXPECT_EQ(whole.load(kStep, 0).row_ids, rows);
  // A resumed run of two ranks that accumulates stands at the same rows.
  for (int rank = 0; rank < 2; ++rank) {
    DataLoader part(data, {.micro_batch_size = 2,
                           .gradient_accumulation = 2,
                           .dp_rank = rank,
                           .dp_size = 2,
                           .seed = 5});
    for (std::int64_t i = 0; i < 2; ++i) {
      const std::size_t at = static_cast<std::size_t>(i * 4 + rank * 2);
      EXPECT_EQ(part.load(kStep, i).row_ids, std::vector<std::int64_t>({rows[at], rows[at + 1]}));
    }
  }
}

}  // namespace
}  // namespace tessera
