// The index of a checkpoint: which rectangle of which global tensor lies where in which file, and the
// checksums of the files' blocks. Knows no ranks' layout: any set of rectangles that covers every tensor
// exactly once is a checkpoint.
//
// On disk: index.json, and commit.json, which names every file with its size (and checksum, for the
// small ones) and is the last file written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/tensor.h"

namespace tessera {

inline constexpr std::string_view kIndexFile = "index.json";
inline constexpr std::string_view kMetadataFile = "metadata.json";
inline constexpr std::string_view kCommitFile = "commit.json";

// Rows [row_begin, + rows) of columns [col_begin, + cols), row-major and dense at `offset` of the file.
// A rank-1 tensor is a column.
struct CheckpointExtent {
  int file = 0;  // into CheckpointIndex::files
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
  std::uint64_t offset = 0;  // from the start of the file; a multiple of the element size
};

struct CheckpointTensor {
  DType dtype = DType::kF32;
  Shape shape;  // rank 1 or 2
  std::vector<CheckpointExtent> extents;

  std::int64_t rows() const { return shape.dims[0]; }
  std::int64_t cols() const { return shape.rank == 2 ? shape.dims[1] : 1; }
  std::uint64_t bytes_of(const CheckpointExtent& extent) const {
    return static_cast<std::uint64_t>(extent.rows) * static_cast<std::uint64_t>(extent.cols) *
           size_of(dtype);
  }
};

struct CheckpointDataFile {
  std::string name;  // "rank-00017.safetensors"
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> checksums;  // CRC-32C of each block of block_bytes, from the file's start
};

struct CheckpointIndex {
  std::uint64_t block_bytes = 0;
  std::vector<CheckpointDataFile> files;
  std::map<std::string, CheckpointTensor, std::less<>> tensors;

  // Adds the files and extents of another rank; kInternal where the two disagree about a tensor.
  void merge(CheckpointIndex other);
  // What is wrong with how the extents cover the tensors: a region stored by none or by two; empty if
  // every tensor is covered exactly once.
  std::string coverage_problem() const;
};

std::string format_index(const CheckpointIndex& index);
// Every number is checked (extents inside their tensor and file, one checksum a block); kUser if
// anything is out of place. `file` begins the message.
CheckpointIndex parse_index(std::string_view text, std::string_view file);

struct CommittedFile {
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> checksum;  // of the whole file; data files have theirs in the index
};

struct CommitRecord {
  std::int64_t step = 0;
  // Saves of one folder count up: "newest" survives a run that went back to an older step.
  std::uint64_t sequence = 0;
  int ranks = 1;
  std::map<std::string, CommittedFile, std::less<>> files;

  std::uint64_t total_bytes() const;
};

std::string format_commit(const CommitRecord& record);
CommitRecord parse_commit(std::string_view text, std::string_view file);  // kUser

// "rows 0 to 128 and columns 16 to 32", "elements 0 to 128" of a rank-1 tensor.
std::string region_text(const Shape& shape, std::int64_t row_begin, std::int64_t row_end,
                        std::int64_t col_begin, std::int64_t col_end);

}  // namespace tessera
