// TensorboardWriter: scalars as a TensorBoard event file, without protobuf or TensorFlow.
//
// An event file is a row of TFRecords (length, masked CRC-32C of the length, payload, masked
// CRC-32C of the payload; all little-endian), each payload a serialised `Event` of
// tensorflow/core/util/event.proto.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

class TensorboardWriter {
 public:
  // Creates `folder` and in it a new event file; TensorBoard joins the files of a resumed run by
  // step. kTransient if it cannot be written.
  explicit TensorboardWriter(const std::filesystem::path& folder);

  using Scalars = std::vector<std::pair<std::string, double>>;  // tag, value
  // One event; on the disk when it returns. kTransient if it cannot be written.
  void write(std::int64_t step, const Scalars& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  void append(const std::string& event);

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

// One TFRecord around `payload`.
std::string tf_record(std::string_view payload);

}  // namespace tessera
