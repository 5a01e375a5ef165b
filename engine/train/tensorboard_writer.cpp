#include "engine/train/tensorboard_writer.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "checkpoint/crc32c.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// Wire types of protobuf's encoding.
enum class Wire : std::uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}

void put_key(std::string& out, int field, Wire wire) {
  put_varint(out, static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire));
}

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, Wire::kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

// Event: 1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary (message).
std::string event_at(double wall_time) {
  std::string event;
  put_key(event, 1, Wire::kFixed64);
  put_little_endian(event, std::bit_cast<std::uint64_t>(wall_time), 8);
  return event;
}

double now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// Masked, since a file that holds checksums of itself is hard on CRCs (TensorFlow's crc32c.h).
std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return std::rotr(crc, 15) + 0xa282ead8u;
}

}  // namespace

std::string tf_record(std::string_view payload) {
  std::string record;
  put_little_endian(record, payload.size(), 8);
  put_little_endian(record, masked_crc(record), 4);
  record += payload;
  put_little_endian(record, masked_crc(payload), 4);
  return record;
}

TensorboardWriter::TensorboardWriter(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  const double time = now();
  // The name carries the second of its start: a run that stops and goes on within it gets a suffix.
  const std::string name = fmt::format("events.out.tfevents.{:010}.{}.{}",
                                       static_cast<std::int64_t>(time), host, getpid());
  path_ = folder / name;
  for (int i = 1; std::filesystem::exists(path_); ++i)
    path_ = folder / fmt::format("{}.{}", name, i);
  file_.reset(std::fopen(path_.c_str(), "wb"));
  if (!file_) {
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[log] {} cannot be written: {}; make room or write log.tensorboard: false",
                 path_.string(), std::strerror(errno));
  }
  std::string event = event_at(time);
  put_bytes(event, 3, "brain.Event:2");
  append(event);
}

void TensorboardWriter::write(std::int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;  // Summary.Value: 1 tag (string), 2 simple_value (float)
    put_bytes(value, 1, tag);
    put_key(value, 2, Wire::kFixed32);
    put_little_endian(value, std::bit_cast<std::uint32_t>(static_cast<float>(number)), 4);
    put_bytes(summary, 1, value);
  }
  std::string event = event_at(now());
  put_key(event, 2, Wire::kVarint);
  put_varint(event, static_cast<std::uint64_t>(step));
  put_bytes(event, 5, summary);
  append(event);
}

void TensorboardWriter::append(const std::string& event) {
  const std::string record = tf_record(event);
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size() ||
      std::fflush(file_.get()) != 0) {
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[log] {} cannot be written: {}; make room or write log.tensorboard: false",
                 path_.string(), std::strerror(errno));
  }
}

}  // namespace tessera
