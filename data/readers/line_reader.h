// Lines of a byte stream. Only "\n" and "\r\n" end a line (U+2028 and a lone "\r" do not); a byte
// order mark at the start is skipped, and UTF-16 is refused by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>

#include "data/readers/byte_stream.h"

namespace tessera {

class LineReader {
 public:
  static constexpr std::int64_t kToEnd = std::numeric_limits<std::int64_t>::max();

  // The lines whose first byte is in [begin, end) of a plain file; a compressed one is read whole.
  LineReader(const std::filesystem::path& path, std::int64_t begin = 0, std::int64_t end = kToEnd);

  // The next line without its end, at most `max_length` bytes of it: the rest follows at the next
  // call (is_continued() says so). False at the end.
  bool next(std::string& line, std::size_t max_length = std::string::npos);

  bool is_continued() const { return continued_; }    // the line just read is not complete
  bool had_newline() const { return had_newline_; }   // false for a last line without one
  std::int64_t line_number() const { return line_; }  // of the line just read, from 1 at `begin`
  std::int64_t stored_position() const { return stream_->stored_position(); }

 private:
  bool fill();  // more bytes into the empty buffer
  int peek();   // next byte or -1

  std::unique_ptr<ByteStream> stream_;
  std::string buffer_;
  std::size_t next_ = 0;
  std::int64_t position_ = 0;     // bytes consumed, from `begin`
  std::int64_t length_ = kToEnd;  // lines start before this position
  std::int64_t line_ = 0;
  bool continued_ = false;
  bool had_newline_ = true;
};

// The number of line ends in the first `length` bytes of a plain file.
std::int64_t count_lines(const std::filesystem::path& path, std::int64_t length);

}  // namespace tessera
