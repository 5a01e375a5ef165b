#include "checkpoint/block_writer.h"

#include <algorithm>
#include <utility>

#include "checkpoint/crc32c.h"
#include "engine/core/error.h"

namespace tessera {

BlockWriter::BlockWriter(std::filesystem::path path, std::uint64_t bytes, BlockSource& source,
                         const BlockWriterOptions& options)
    : path_(std::move(path)),
      bytes_(bytes),
      source_(&source),
      options_(options),
      file_(path_, bytes),
      start_(std::chrono::steady_clock::now()) {
  CHECK(options_.block_bytes > 0 && options_.block_bytes % kDirectAlignment == 0,
        "[checkpoint] blocks of {} bytes, wanted a multiple of {}", options_.block_bytes,
        kDirectAlignment);
  const std::uint64_t blocks = (bytes + options_.block_bytes - 1) / options_.block_bytes;
  checksums_.resize(blocks);
  const std::uint64_t threads =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(std::max(1, options_.threads)), blocks);
  try {
    for (std::uint64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    cancel();
    for (std::thread& thread : threads_) thread.join();
    throw;
  }
}

BlockWriter::~BlockWriter() {
  cancel();
  for (std::thread& thread : threads_) thread.join();
}

void BlockWriter::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
  source_->cancel();
}

void BlockWriter::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_ && !cancelled_) error_ = std::move(error);
    cancelled_ = true;
  }
  changed_.notify_all();
  source_->cancel();
}

void BlockWriter::work() {
  try {
    for (;;) {
      const std::uint64_t index = next_.fetch_add(1);
      if (index >= checksums_.size()) return;
      const char* data = source_->acquire(index);
      if (data == nullptr) return;
      const std::uint64_t offset = index * options_.block_bytes;
      const auto bytes =
          static_cast<std::size_t>(std::min(options_.block_bytes, bytes_ - offset));
      checksums_[index] = crc32c(data, bytes);
      if (options_.bytes_per_second > 0) pace(bytes);
      {
        const std::lock_guard lock(mutex_);
        if (cancelled_) return;
      }
      file_.write(offset, data, bytes);
      source_->release(index);
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

void BlockWriter::pace(std::size_t bytes) {
  std::unique_lock lock(mutex_);
  paced_seconds_ += static_cast<double>(bytes) / options_.bytes_per_second;
  const auto due = start_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                std::chrono::duration<double>(paced_seconds_));
  changed_.wait_until(lock, due, [&] { return cancelled_; });
}

std::vector<std::uint32_t> BlockWriter::finish() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  {
    const std::lock_guard lock(mutex_);
    if (error_ || cancelled_) file_.discard();
    if (error_) std::rethrow_exception(error_);
    if (cancelled_) {
      TESSERA_FAIL(ErrorKind::kTransient, "[checkpoint] writing {} was stopped before its end",
                   path_.string());
    }
  }
  file_.finish();
  return std::move(checksums_);
}

}  // namespace tessera
