#include "checkpoint/checkpoint_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "checkpoint/crc32c.h"
#include "checkpoint/direct_file.h"
#include "checkpoint/file_image.h"
#include "checkpoint/rectangle_copy.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"
#include "engine/device/buffer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "checkpoint";
constexpr std::uint64_t kLargestFile = std::uint64_t{4} << 30;
// Device pieces are filled by way of two such pieces of pinned host memory.
constexpr std::int64_t kStagingBytes = std::int64_t{64} << 20;

std::string read_committed_file(const fs::path& checkpoint, const CommitRecord& record,
                                std::string_view name) {
  const fs::path path = checkpoint / name;
  const auto entry = record.files.find(name);
  CHECK_USER(entry != record.files.end(), "[checkpoint] {} holds no {}", checkpoint.string(), name);
  std::string text = read_text_file(path, kLargestFile, kWho);
  CHECK_USER(entry->second.checksum.has_value() &&
                 crc32c(text.data(), text.size()) == *entry->second.checksum,
             "[checkpoint] {} is damaged: its checksum does not fit. Resume from an earlier "
             "checkpoint",
             path.string());
  return text;
}

// Runs work(i) for i in [0, count) on a few threads; rethrows the first error.
void run_parallel(std::size_t count, int threads, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto loop = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  for (std::size_t i = 1; i < std::min(count, static_cast<std::size_t>(std::max(threads, 1))); ++i) {
    helpers.emplace_back(loop);
  }
  loop();
  for (std::thread& helper : helpers) helper.join();
  if (error) std::rethrow_exception(error);
}

struct BlockPlace {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

BlockPlace place_of(const CheckpointIndex& index, const CheckpointDataFile& file,
                    std::uint64_t block) {
  const std::uint64_t begin = block * index.block_bytes;
  return {begin, std::min(begin + index.block_bytes, file.bytes)};
}

// The tensors that have bytes in [begin, end) of a file, for a message.
std::string tensors_in(const CheckpointIndex& index, int file, const BlockPlace& place) {
  std::vector<std::string> names;
  std::size_t more = 0;
  for (const auto& [name, tensor] : index.tensors) {
    for (const CheckpointExtent& extent : tensor.extents) {
      if (extent.file != file || extent.offset >= place.end ||
          extent.offset + tensor.bytes_of(extent) <= place.begin) {
        continue;
      }
      if (names.size() < 8) {
        names.push_back(extent_name(printable_name(name), tensor.shape, extent));
      } else {
        ++more;
      }
    }
  }
  if (names.empty()) return "the file's header";
  std::string text = fmt::format("{}", fmt::join(names, ", "));
  if (more > 0) text += fmt::format(" and {} more", more);
  return text;
}

std::string block_problem(const CheckpointIndex& index, const fs::path& checkpoint, int file,
                          const BlockPlace& place) {
  return fmt::format(
      "[checkpoint] {} is damaged: bytes {} to {} do not have the checksum that was saved with them "
      "(in {})",
      (checkpoint / index.files[static_cast<std::size_t>(file)].name).string(), place.begin,
      place.end, tensors_in(index, file, place));
}

// One rectangle to fill in host memory, and the tensor it is of.
struct Target {
  HostRectangle rectangle;
  const CheckpointTensor* tensor = nullptr;
};

// What one block gives to one target.
struct Use {
  std::size_t target = 0;
  const CheckpointExtent* extent = nullptr;
};

// The blocks that a set of targets needs, each read once.
class ReadPlan {
 public:
  ReadPlan(const CheckpointIndex& index, std::vector<Target> targets)
      : index_(&index), targets_(std::move(targets)) {
    std::map<std::pair<int, std::uint64_t>, std::vector<Use>> uses;
    for (std::size_t t = 0; t < targets_.size(); ++t) {
      const Target& target = targets_[t];
      const std::uint64_t size = size_of(target.tensor->dtype);
      for (const CheckpointExtent& extent : target.tensor->extents) {
        const Overlap overlap = overlap_of(target.rectangle, extent);
        if (overlap.is_empty()) continue;
        const auto offset_of = [&](std::int64_t row, std::int64_t col) {
          return extent.offset + static_cast<std::uint64_t>((row - extent.row_begin) * extent.cols +
                                                            (col - extent.col_begin)) *
                                     size;
        };
        const std::uint64_t begin = offset_of(overlap.row_begin, overlap.col_begin);
        const std::uint64_t end = offset_of(overlap.row_end - 1, overlap.col_end - 1) + size;
        for (std::uint64_t block = begin / index.block_bytes; block * index.block_bytes < end;
             ++block) {
          uses[{extent.file, block}].push_back({t, &extent});
        }
      }
    }
    blocks_.assign(std::make_move_iterator(uses.begin()), std::make_move_iterator(uses.end()));
  }

  void run(const fs::path& checkpoint, const std::vector<FileHandle>& files, int threads) const {
    run_parallel(blocks_.size(), threads, [&](std::size_t i) {
      const auto& [key, uses] = blocks_[i];
      const auto& [file, block] = key;
      const CheckpointDataFile& data = index_->files[static_cast<std::size_t>(file)];
      const BlockPlace place = place_of(*index_, data, block);
      thread_local AlignedMemory memory;
      thread_local std::size_t capacity = 0;
      if (capacity < index_->block_bytes) {
        memory = allocate_aligned(index_->block_bytes);
        capacity = index_->block_bytes;
      }
      const auto bytes = static_cast<std::size_t>(place.end - place.begin);
      read_at(files[static_cast<std::size_t>(file)], place.begin, memory.get(), bytes,
              checkpoint / data.name, kWho);
      CHECK_USER(crc32c(memory.get(), bytes) == data.checksums[block],
                 "{}. Resume from an earlier checkpoint",
                 block_problem(*index_, checkpoint, file, place));
      for (const Use& use : uses) {
        const Target& target = targets_[use.target];
        copy_from_block(memory.get(), place.begin, place.end, *use.extent, target.tensor->dtype,
                        target.rectangle);
      }
    });
  }

 private:
  const CheckpointIndex* index_;
  std::vector<Target> targets_;
  std::vector<std::pair<std::pair<int, std::uint64_t>, std::vector<Use>>> blocks_;
};

const CheckpointTensor& tensor_for(const CheckpointIndex& index, const fs::path& checkpoint,
                                   const NamedState& state) {
  const auto found = index.tensors.find(state.name);
  CHECK_USER(found != index.tensors.end(), "[checkpoint] {} holds no {}", checkpoint.string(),
             state.name);
  const CheckpointTensor& tensor = found->second;
  CHECK_USER(tensor.shape == state.shape, "[checkpoint] {}: {} is {}, wanted {}",
             checkpoint.string(), state.name, to_string(tensor.shape), to_string(state.shape));
  return tensor;
}

void check_target(const fs::path& checkpoint, const NamedState& state,
                  const CheckpointTensor& tensor, const StatePiece& piece) {
  CHECK(piece.row_begin >= 0 && piece.col_begin >= 0 && piece.rows >= 0 && piece.cols >= 0 &&
            piece.data.is_dense() && piece.data.numel() == piece.rows * piece.cols,
        "[checkpoint] {}: a piece of {} x {} at ({}, {}) lies in {}", state.name, piece.rows,
        piece.cols, piece.row_begin, piece.col_begin, to_string(piece.data));
  CHECK_USER(can_convert(tensor.dtype, piece.data.dtype),
             "[checkpoint] {}: {} is {}, which cannot be read as {}", checkpoint.string(), state.name,
             name_of(tensor.dtype), name_of(piece.data.dtype));
  // Extents do not overlap, so the areas add up.
  const HostRectangle wanted{nullptr,    piece.data.dtype, piece.row_begin,
                             piece.rows, piece.col_begin,  piece.cols};
  std::int64_t covered = 0;
  for (const CheckpointExtent& extent : tensor.extents) covered += overlap_of(wanted, extent).elements();
  CHECK_USER(covered == piece.rows * piece.cols,
             "[checkpoint] {} holds only {} of {} elements of {} in {}", checkpoint.string(), covered,
             piece.rows * piece.cols, state.name,
             region_text(state.shape, piece.row_begin, piece.row_begin + piece.rows,
                         piece.col_begin, piece.col_begin + piece.cols));
}

// Device pieces: filled in pinned memory, band by band, and copied by the stream while the next bands
// are read.
class DeviceReader {
 public:
  DeviceReader(const CheckpointIndex& index, const fs::path& checkpoint,
               const std::vector<FileHandle>& files, int threads, Stream& stream)
      : index_(&index), checkpoint_(&checkpoint), files_(&files), threads_(threads), stream_(&stream) {
    for (Half& half : halves_) half.copied = stream.context().make_event();
  }

  void add(const CheckpointTensor& tensor, const StatePiece& piece) {
    const auto size = static_cast<std::int64_t>(size_of(piece.data.dtype));
    const std::int64_t row_bytes = piece.cols * size;
    const std::int64_t most_rows = std::max<std::int64_t>(1, kStagingBytes / row_bytes);
    for (std::int64_t row = 0; row < piece.rows;) {
      const std::int64_t rows = std::min(most_rows, piece.rows - row);
      if (used_ > 0 && used_ + rows * row_bytes > kStagingBytes) flush();
      Band band;
      band.target.tensor = &tensor;
      band.target.rectangle = {nullptr, piece.data.dtype, piece.row_begin + row,
                               rows,    piece.col_begin,  piece.cols};
      band.offset = used_;
      band.bytes = rows * row_bytes;
      band.destination = static_cast<char*>(piece.data.data) + row * row_bytes;
      used_ += (band.bytes + 255) / 256 * 256;
      bands_.push_back(band);
      row += rows;
    }
  }

  void flush() {
    if (bands_.empty()) return;
    Half& half = halves_[turn_];
    turn_ = 1 - turn_;
    half.copied->synchronize();
    if (half.memory.bytes() < static_cast<std::size_t>(used_)) {
      half.memory = Buffer(stream_->context(),
                           static_cast<std::size_t>(std::max(used_, kStagingBytes)),
                           MemoryKind::kPinnedHost);
    }
    std::vector<Target> targets;
    for (Band& band : bands_) {
      band.target.rectangle.data = static_cast<char*>(half.memory.data()) + band.offset;
      targets.push_back(band.target);
    }
    ReadPlan(*index_, std::move(targets)).run(*checkpoint_, *files_, threads_);
    for (const Band& band : bands_) {
      stream_->copy_bytes(band.destination, band.target.rectangle.data,
                          static_cast<std::size_t>(band.bytes));
    }
    stream_->record(*half.copied);
    bands_.clear();
    used_ = 0;
  }

 private:
  struct Band {
    Target target;
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    char* destination = nullptr;
  };
  struct Half {
    Buffer memory;
    std::unique_ptr<Event> copied;
  };
  const CheckpointIndex* index_;
  const fs::path* checkpoint_;
  const std::vector<FileHandle>* files_;
  int threads_;
  Stream* stream_;
  std::vector<Band> bands_;
  std::int64_t used_ = 0;
  Half halves_[2];
  int turn_ = 0;
};

}  // namespace

CheckpointReader::CheckpointReader(fs::path checkpoint, CheckpointReaderOptions options)
    : path_(std::move(checkpoint)), options_(options), record_(read_commit_record(path_)) {
  const std::string name = (path_ / kIndexFile).string();
  index_ = parse_index(read_committed_file(path_, record_, kIndexFile), name);
  metadata_ = read_committed_file(path_, record_, kMetadataFile);
  for (const CheckpointDataFile& file : index_.files) {
    const auto committed = record_.files.find(file.name);
    CHECK_USER(committed != record_.files.end() && committed->second.bytes == file.bytes,
               "[checkpoint] {} places tensors in {}, which {} does not list with {} bytes", name,
               file.name, kCommitFile, file.bytes);
    files_.push_back(open_for_reading(path_ / file.name, kWho));
  }
  const std::string problem = index_.coverage_problem();
  CHECK_USER(problem.empty(), "[checkpoint] {}: {}", name, problem);
}

std::string CheckpointReader::read_file(std::string_view name) const {
  return read_committed_file(path_, record_, name);
}

void CheckpointReader::read(std::span<const NamedState> states, Stream& stream) const {
  stream.synchronize();
  std::vector<Target> host;
  std::vector<std::pair<const CheckpointTensor*, const StatePiece*>> device;
  for (const NamedState& state : states) {
    const CheckpointTensor& tensor = tensor_for(index_, path_, state);
    for (const StatePiece& piece : state.pieces) {
      if (piece.rows == 0 || piece.cols == 0) continue;
      check_target(path_, state, tensor, piece);
      if (piece.data.device.kind == DeviceKind::kCpu) {
        host.push_back({{static_cast<char*>(piece.data.data), piece.data.dtype, piece.row_begin,
                         piece.rows, piece.col_begin, piece.cols},
                        &tensor});
      } else {
        device.emplace_back(&tensor, &piece);
      }
    }
  }
  ReadPlan(index_, std::move(host)).run(path_, files_, options_.threads);
  if (device.empty()) return;
  DeviceReader reader(index_, path_, files_, options_.threads, stream);
  for (const auto& [tensor, piece] : device) reader.add(*tensor, *piece);
  reader.flush();
  stream.synchronize();
}

namespace {

// Compares what the safetensors header says with the index: other tools read the file by the header.
void verify_header(const CheckpointIndex& index, const fs::path& checkpoint, int file,
                   std::vector<CheckpointDamage>& damages) {
  const std::string& name = index.files[static_cast<std::size_t>(file)].name;
  try {
    const SafetensorsFile header(checkpoint / name);
    std::size_t expected = 0;
    for (const auto& [tensor_name, tensor] : index.tensors) {
      for (const CheckpointExtent& extent : tensor.extents) {
        if (extent.file != file) continue;
        ++expected;
        const SafetensorsTensor* entry = header.find(extent_name(tensor_name, tensor.shape, extent));
        CHECK_USER(entry != nullptr && entry->stored_dtype == safetensors_name(tensor.dtype) &&
                       entry->shape == extent_shape(tensor.shape, extent) &&
                       header.data_start() + entry->begin == extent.offset,
                   "[checkpoint] {}: header and index disagree about {}",
                   (checkpoint / name).string(), extent_name(tensor_name, tensor.shape, extent));
      }
    }
    CHECK_USER(header.tensors().size() == expected,
               "[checkpoint] {} holds {} tensors, the index knows {}", (checkpoint / name).string(),
               header.tensors().size(), expected);
  } catch (const Error& error) {
    damages.push_back({name, error.what()});
  }
}

void verify_blocks(const CheckpointReader& reader, int threads, int file,
                   std::vector<CheckpointDamage>& damages) {
  const CheckpointIndex& index = reader.index();
  const CheckpointDataFile& data = index.files[static_cast<std::size_t>(file)];
  const fs::path path = reader.path() / data.name;
  const FileHandle handle = open_for_reading(path, kWho);
  std::mutex mutex;
  std::map<std::uint64_t, std::string> problems;  // by block
  run_parallel(data.checksums.size(), threads, [&](std::size_t block) {
    const BlockPlace place = place_of(index, data, block);
    const auto bytes = static_cast<std::size_t>(place.end - place.begin);
    const AlignedMemory memory = allocate_aligned(bytes);
    std::string problem;
    try {
      read_at(handle, place.begin, memory.get(), bytes, path, kWho);
      if (crc32c(memory.get(), bytes) != data.checksums[block]) {
        problem = block_problem(index, reader.path(), file, place);
      }
    } catch (const Error& error) {  // a bad sector: the other blocks are still worth a look
      problem = error.what();
    }
    if (problem.empty()) return;
    const std::lock_guard lock(mutex);
    problems.emplace(block, std::move(problem));
  });
  for (auto& [block, problem] : problems) damages.push_back({data.name, std::move(problem)});
}

}  // namespace

std::vector<CheckpointDamage> verify_checkpoint(const fs::path& checkpoint,
                                                CheckpointReaderOptions options) {
  std::vector<CheckpointDamage> damages;
  std::unique_ptr<CheckpointReader> reader;
  try {
    reader = std::make_unique<CheckpointReader>(checkpoint, options);
  } catch (const Error& error) {
    damages.push_back({"", error.what()});
    return damages;
  }
  for (const auto& [name, file] : reader->record().files) {
    if (!file.checksum || name == kIndexFile || name == kMetadataFile) continue;
    try {
      (void)reader->read_file(name);
    } catch (const Error& error) {
      damages.push_back({name, error.what()});
    }
  }
  for (int file = 0; file < static_cast<int>(reader->index().files.size()); ++file) {
    verify_header(reader->index(), checkpoint, file, damages);
    verify_blocks(*reader, options.threads, file, damages);
  }
  return damages;
}

}  // namespace tessera
