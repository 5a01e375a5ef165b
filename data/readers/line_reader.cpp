#include "data/readers/line_reader.h"

#include <algorithm>
#include <cstring>

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::size_t kBuffer = 1 << 18;

}  // namespace

LineReader::LineReader(const std::filesystem::path& path, std::int64_t begin, std::int64_t end) {
  const bool in_middle = begin > 0;
  // Reading starts one byte early: only a line end there makes `begin` the start of a line.
  stream_ = open_stream(path, in_middle ? begin - 1 : 0);
  if (end != kToEnd) length_ = end - begin;
  if (in_middle) {
    std::string rest;
    bool any = fill();
    while (any) {
      const auto* found = static_cast<const char*>(
          std::memchr(buffer_.data() + next_, '\n', buffer_.size() - next_));
      if (found != nullptr) {
        next_ = static_cast<std::size_t>(found - buffer_.data()) + 1;
        position_ += static_cast<std::int64_t>(next_);
        break;
      }
      position_ += static_cast<std::int64_t>(buffer_.size());
      next_ = buffer_.size();
      any = fill();
    }
    position_ -= 1;
    return;
  }
  if (!fill()) return;
  while (buffer_.size() < 3) {  // a stream may give its first bytes one by one
    std::string head = buffer_;
    if (!fill()) {
      buffer_ = head;
      next_ = 0;
      break;
    }
    buffer_.insert(0, head);
  }
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(buffer_[i]); };
  if (buffer_.size() >= 3 && byte(0) == 0xEF && byte(1) == 0xBB && byte(2) == 0xBF) {
    next_ = 3;
    position_ = 3;
  } else if (buffer_.size() >= 2) {
    CHECK_USER(!((byte(0) == 0xFF && byte(1) == 0xFE) || (byte(0) == 0xFE && byte(1) == 0xFF)),
               "[data] {} is UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8",
               path.string());
  }
}

bool LineReader::fill() {
  buffer_.resize(kBuffer);
  next_ = 0;
  buffer_.resize(stream_->read(buffer_.data(), kBuffer));
  return !buffer_.empty();
}

int LineReader::peek() {
  if (next_ == buffer_.size() && !fill()) return -1;
  return static_cast<unsigned char>(buffer_[next_]);
}

bool LineReader::next(std::string& line, std::size_t max_length) {
  line.clear();
  if (!continued_ && position_ >= length_) return false;
  if (peek() < 0) return false;
  if (!continued_) ++line_;
  continued_ = false;
  had_newline_ = false;
  while (peek() >= 0) {
    const char* start = buffer_.data() + next_;
    const std::size_t available = buffer_.size() - next_;
    const auto* found = static_cast<const char*>(std::memchr(start, '\n', available));
    const std::size_t run = found != nullptr ? static_cast<std::size_t>(found - start) : available;
    if (run > 0 && line.size() + run > max_length) {
      const std::size_t take = max_length - line.size();
      line.append(start, take);
      next_ += take;
      position_ += static_cast<std::int64_t>(take);
      continued_ = true;
      return true;
    }
    line.append(start, run);
    next_ += run;
    position_ += static_cast<std::int64_t>(run);
    if (found != nullptr) {
      ++next_;
      ++position_;
      had_newline_ = true;
      break;
    }
  }
  if (had_newline_ && !line.empty() && line.back() == '\r') line.pop_back();
  return true;
}

std::int64_t count_lines(const std::filesystem::path& path, std::int64_t length) {
  const auto stream = open_stream(path);
  std::string buffer(kBuffer, '\0');
  std::int64_t lines = 0;
  while (length > 0) {
    const std::size_t got = stream->read(
        buffer.data(), static_cast<std::size_t>(std::min<std::int64_t>(length, kBuffer)));
    if (got == 0) break;
    lines += std::count(buffer.data(), buffer.data() + got, '\n');
    length -= static_cast<std::int64_t>(got);
  }
  return lines;
}

}  // namespace tessera
