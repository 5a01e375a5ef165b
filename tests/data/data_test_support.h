// What the tests of data/ share: a scratch folder and short ways to prepare and load.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "data/encoder.h"
#include "data/loader.h"
#include "data/prepare.h"
#include "engine/core/error.h"

namespace tessera::test {

class ScratchFolder {
 public:
  ScratchFolder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            ("tessera-data-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

  std::string write(const std::string& name, const std::string& bytes) const {
    const auto file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << bytes;
    return file.string();
  }

 private:
  std::filesystem::path path_;
};

// Data tests: every one has its own cache in its scratch folder and the byte tokenizer.
class DataTest : public ::testing::Test {
 protected:
  DataTest() {
    options.cache_dir = (scratch.path() / "cache").string();
    settings.encoder = &encoder;
    settings.vocab_size = encoder.vocab_size;
    settings.sequence_length = 16;
    settings.threads = 2;
  }

  std::string write(const std::string& name, const std::string& bytes) {
    return scratch.write(name, bytes);
  }

  void add_source(const std::string& path) {
    options.train.emplace_back();
    options.train.back().path = path;
  }

  PreparedData prepare() { return prepare_data(options, settings); }

  std::shared_ptr<const Dataset> prepare_file(const std::string& name, const std::string& bytes) {
    options.train.clear();
    add_source(write(name, bytes));
    return prepare().train;
  }

  // The message of the error, or "no error".
  std::string error_of_file(const std::string& name, const std::string& bytes,
                            ErrorKind kind = ErrorKind::kUser) {
    try {
      prepare_file(name, bytes);
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
      return error.what();
    }
    return "no error";
  }

  ScratchFolder scratch;
  TextEncoder encoder = byte_encoder();
  DataOptions options;
  PrepareSettings settings;
};

// The (inputs, targets) of each row in index order, padding cut off.
struct PlainRow {
  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> lengths;
};

inline std::vector<PlainRow> all_rows(const Dataset& dataset) {
  std::vector<PlainRow> rows;
  const auto length = static_cast<std::size_t>(dataset.sequence_length());
  for (std::int64_t i = 0; i < dataset.num_rows(); ++i) {
    PlainRow row{std::vector<std::int32_t>(length),
                 std::vector<std::int32_t>(length),
                 std::vector<std::int32_t>(length),
                 {}};
    dataset.read_row(i, row.inputs.data(), row.targets.data(), row.positions.data(), row.lengths);
    std::size_t used = 0;
    for (const std::int32_t n : row.lengths) used += static_cast<std::size_t>(n);
    row.inputs.resize(used);
    row.targets.resize(used);
    row.positions.resize(used);
    rows.push_back(std::move(row));
  }
  return rows;
}

// The text of bytes; '|' for the end of a document.
inline std::string text_of(const std::vector<std::int32_t>& ids) {
  std::string text;
  for (const std::int32_t id : ids) text += id == 257 ? '|' : static_cast<char>(id);
  return text;
}

}  // namespace tessera::test
