#include "data/readers/byte_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#if TESSERA_WITH_ZLIB
#include <zlib.h>
#endif
#if TESSERA_WITH_ZSTD
#include <zstd.h>
#endif

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::size_t kChunk = 1 << 18;

class PlainStream : public ByteStream {
 public:
  PlainStream(const std::filesystem::path& path, std::int64_t begin) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK_USER(fd_ >= 0, "[data] {} cannot be opened: {}", path.string(), std::strerror(errno));
    if (begin > 0 && ::lseek(fd_, begin, SEEK_SET) < 0) {
      const int code = errno;
      ::close(fd_);
      TESSERA_FAIL(ErrorKind::kUser, "[data] {} cannot be read from byte {}: {}", path.string(),
                   begin, std::strerror(code));
    }
  }
  ~PlainStream() override { ::close(fd_); }
  PlainStream(const PlainStream&) = delete;
  PlainStream& operator=(const PlainStream&) = delete;

  std::size_t read(char* out, std::size_t size) override {
    while (true) {
      const ssize_t got = ::read(fd_, out, size);
      if (got >= 0) {
        position_ += got;
        return static_cast<std::size_t>(got);
      }
      if (errno == EINTR) continue;
      CHECK_USER(errno != EISDIR, "[data] {} is a folder, expected a file", path_.string());
      TESSERA_FAIL(ErrorKind::kTransient, "[data] reading {} failed: {}", path_.string(),
                   std::strerror(errno));
    }
  }

  std::int64_t stored_position() const override { return position_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::int64_t position_ = 0;
};

#if TESSERA_WITH_ZLIB
// Several gzip members one behind the other (as parallel compressors write) are one stream.
class GzipStream : public ByteStream {
 public:
  explicit GzipStream(const std::filesystem::path& path)
      : path_(path), file_(path, 0), in_(kChunk) {
    // 16 + 15: gzip header with the largest window.
    CHECK(inflateInit2(&state_, 16 + 15) == Z_OK, "[data] zlib could not be started");
  }
  ~GzipStream() override { inflateEnd(&state_); }

  std::size_t read(char* out, std::size_t size) override {
    state_.next_out = reinterpret_cast<Bytef*>(out);
    state_.avail_out = static_cast<uInt>(std::min<std::size_t>(size, 1u << 30));
    const auto wanted = state_.avail_out;
    while (state_.avail_out == wanted) {
      if (state_.avail_in == 0) {
        state_.next_in = reinterpret_cast<Bytef*>(in_.data());
        state_.avail_in = static_cast<uInt>(file_.read(in_.data(), in_.size()));
        if (state_.avail_in == 0) {
          CHECK_USER(at_member_end_, "[data] {} ends in the middle of its compressed data",
                     path_.string());
          return 0;
        }
      }
      if (at_member_end_) {
        inflateReset(&state_);
        at_member_end_ = false;
      }
      const int code = inflate(&state_, Z_NO_FLUSH);
      if (code == Z_STREAM_END) {
        at_member_end_ = true;
      } else {
        CHECK_USER(code == Z_OK || code == Z_BUF_ERROR, "[data] {} is not valid gzip data: {}",
                   path_.string(), state_.msg != nullptr ? state_.msg : "damaged");
      }
    }
    return wanted - state_.avail_out;
  }
  std::int64_t stored_position() const override { return file_.stored_position(); }

 private:
  std::filesystem::path path_;
  PlainStream file_;
  std::vector<char> in_;
  z_stream state_{};
  bool at_member_end_ = false;
};
#endif

#if TESSERA_WITH_ZSTD
class ZstdStream : public ByteStream {
 public:
  explicit ZstdStream(const std::filesystem::path& path)
      : path_(path), file_(path, 0), in_(kChunk), state_(ZSTD_createDStream()) {
    CHECK(state_ != nullptr, "[data] zstd could not be started");
    // Files made with --long need up to 2 GiB of window.
    ZSTD_DCtx_setParameter(state_, ZSTD_d_windowLogMax, 31);
  }
  ~ZstdStream() override { ZSTD_freeDStream(state_); }

  std::size_t read(char* out, std::size_t size) override {
    ZSTD_outBuffer produced{out, size, 0};
    while (produced.pos == 0) {
      if (given_.pos == given_.size) {
        given_ = {in_.data(), file_.read(in_.data(), in_.size()), 0};
        if (given_.size == 0) {
          CHECK_USER(expected_ == 0, "[data] {} ends in the middle of its compressed data",
                     path_.string());
          return 0;
        }
      }
      expected_ = ZSTD_decompressStream(state_, &produced, &given_);
      CHECK_USER(!ZSTD_isError(expected_), "[data] {} is not valid Zstandard data: {}",
                 path_.string(), ZSTD_getErrorName(expected_));
    }
    return produced.pos;
  }
  std::int64_t stored_position() const override { return file_.stored_position(); }

 private:
  std::filesystem::path path_;
  PlainStream file_;
  std::vector<char> in_;
  ZSTD_DStream* state_;
  ZSTD_inBuffer given_{nullptr, 0, 0};
  std::size_t expected_ = 0;
};
#endif

}  // namespace

Compression detect_compression(const std::filesystem::path& path) {
  PlainStream file(path, 0);
  unsigned char magic[4] = {};
  std::size_t got = 0;
  while (got < 4) {
    const std::size_t n = file.read(reinterpret_cast<char*>(magic) + got, 4 - got);
    if (n == 0) break;
    got += n;
  }
  if (got >= 2 && magic[0] == 0x1f && magic[1] == 0x8b) return Compression::kGzip;
  if (got == 4 && magic[0] == 0x28 && magic[1] == 0xb5 && magic[2] == 0x2f && magic[3] == 0xfd) {
    return Compression::kZstd;
  }
  return Compression::kNone;
}

std::unique_ptr<ByteStream> open_stream(const std::filesystem::path& path, std::int64_t begin) {
  const Compression compression = detect_compression(path);
  CHECK(begin == 0 || compression == Compression::kNone,
        "[data] {} is compressed and cannot be read from the middle", path.string());
  switch (compression) {
    case Compression::kNone:
      return std::make_unique<PlainStream>(path, begin);
    case Compression::kGzip:
#if TESSERA_WITH_ZLIB
      return std::make_unique<GzipStream>(path);
#else
      TESSERA_FAIL(ErrorKind::kUser,
                   "[data] {} is gzip data and this build has no zlib; unpack it, or install "
                   "zlib1g-dev and build again",
                   path.string());
#endif
    case Compression::kZstd:
#if TESSERA_WITH_ZSTD
      return std::make_unique<ZstdStream>(path);
#else
      TESSERA_FAIL(
          ErrorKind::kUser,
          "[data] {} is Zstandard data and this build has no libzstd; unpack it, or install "
          "libzstd-dev and build again",
          path.string());
#endif
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[data] unknown compression");
}

}  // namespace tessera
