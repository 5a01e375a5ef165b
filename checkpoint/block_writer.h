// Writes a file of known size block by block on a few threads, with a checksum of every block.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/direct_file.h"

namespace tessera {

// Where the blocks' bytes come from. Called by the writer's threads.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Blocks until block `index` is in host memory; null when cancelled. Blocks are asked for in order,
  // several at a time. The memory is as DirectFile::write wants it.
  virtual const char* acquire(std::uint64_t index) = 0;
  // The block has been written.
  virtual void release(std::uint64_t index) = 0;
  // Makes every acquire, now and later, return null.
  virtual void cancel() = 0;
  // Called once by the thread that will wait for the writer: does what the copies need of a thread of
  // the source's own and returns when they are done, or early when cancelled. Throws what they threw.
  virtual void run() = 0;
};

struct BlockWriterOptions {
  std::uint64_t block_bytes = std::uint64_t{4} << 20;
  int threads = 4;
  double bytes_per_second = 0;  // slows the writing down; 0: as fast as it goes
};

class BlockWriter {
 public:
  // Starts at once. `source` outlives the writer.
  BlockWriter(std::filesystem::path path, std::uint64_t bytes, BlockSource& source,
              const BlockWriterOptions& options);
  ~BlockWriter();  // cancels what has not been written
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  // Waits for the last block, flushes the file and returns the checksums. Throws the first error of
  // any thread; after cancel() that is kTransient.
  std::vector<std::uint32_t> finish();
  // From any thread; finish() then returns soon.
  void cancel();

 private:
  void work();
  void pace(std::size_t bytes);
  void fail(std::exception_ptr error);

  std::filesystem::path path_;
  std::uint64_t bytes_ = 0;
  BlockSource* source_;
  BlockWriterOptions options_;
  DirectFile file_;
  std::vector<std::uint32_t> checksums_;
  std::atomic<std::uint64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool cancelled_ = false;
  double paced_seconds_ = 0;  // when, from the first block on, the next one may go
  std::chrono::steady_clock::time_point start_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
