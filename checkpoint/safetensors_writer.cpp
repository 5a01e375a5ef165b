#include "checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/json_text.h"
#include "checkpoint/safetensors_folder.h"
#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWho = "safetensors";
constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

// Takes the file's whole space at once, so that a full disk is known before hours of writing.
void reserve_space(const FileHandle& file, std::uint64_t bytes, const fs::path& path) {
  if (bytes == 0) return;
  int result = 0;
  do {
    result = ::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0 || (errno != ENOSPC && errno != EDQUOT)) return;  // not every file system can
  TESSERA_FAIL(
      ErrorKind::kTransient,
      "[safetensors] writing {} failed: {}; it takes {} bytes. Free some space or write to "
      "another disk",
      path.string(), std::generic_category().message(errno), bytes);
}

bool all_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Is `name` a shard of `stem`: "<stem>-NNNNN-of-NNNNN.safetensors"?
bool is_shard_name(std::string_view name, std::string_view stem) {
  constexpr std::string_view kExtension = ".safetensors";
  constexpr std::string_view kOf = "-of-";
  if (!name.starts_with(stem) || !name.ends_with(kExtension)) return false;
  name.remove_prefix(stem.size());
  name.remove_suffix(kExtension.size());
  if (!name.starts_with('-')) return false;
  name.remove_prefix(1);
  const std::size_t of = name.find(kOf);
  return of != std::string_view::npos && all_digits(name.substr(0, of)) &&
         all_digits(name.substr(of + kOf.size()));
}

std::vector<std::string> file_names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) {
    TESSERA_FAIL(ErrorKind::kTransient, "[safetensors] reading the folder {} failed: {}",
                 folder.string(), error.message());
  }
  for (const fs::directory_entry& entry : entries)
    names.push_back(entry.path().filename().string());
  return names;
}

}  // namespace

std::uint64_t SafetensorsSpec::bytes() const {
  std::uint64_t total = size_of(dtype);
  for (const std::int64_t dim : shape) total *= static_cast<std::uint64_t>(dim);
  return total;
}

SafetensorsWriter::SafetensorsWriter(fs::path path, const std::vector<SafetensorsSpec>& tensors,
                                     const SafetensorsOptions& options)
    : path_(std::move(path)), temporary_(temporary_name(path_)) {
  CHECK(options.data_alignment >= 1 && std::has_single_bit(options.data_alignment),
        "[safetensors] data_alignment {} is not a power of two", options.data_alignment);
  std::set<std::string_view> names;
  std::uint64_t offset = 0;
  for (const SafetensorsSpec& spec : tensors) {
    CHECK(names.insert(spec.name).second && spec.name != "__metadata__",
          "[safetensors] tensor {} is in the list twice or not nameable", spec.name);
    SafetensorsTensor tensor;
    tensor.name = spec.name;
    tensor.stored_dtype = safetensors_name(spec.dtype);
    tensor.dtype = spec.dtype;
    tensor.shape = spec.shape;
    tensor.begin = offset;
    offset += spec.bytes();
    tensor.end = offset;
    tensors_.push_back(std::move(tensor));
  }
  std::string header = format_safetensors_header(tensors_, options.metadata);
  const std::uint64_t unaligned = (8 + header.size()) % options.data_alignment;
  if (unaligned != 0) header.append(options.data_alignment - unaligned, ' ');
  CHECK_USER(header.size() <= SafetensorsFile::kLargestHeader,
             "[safetensors] {}: the header of {} tensors has {} bytes, the limit is {}. Use more "
             "shards",
             path_.string(), tensors_.size(), header.size(), SafetensorsFile::kLargestHeader);

  file_ = create_for_writing(temporary_, kWho);
  try {
    reserve_space(file_, 8 + header.size() + offset, path_);
    buffer_.reserve(kBufferBytes);
    const std::uint64_t header_bytes = header.size();
    const auto* length = reinterpret_cast<const char*>(&header_bytes);
    buffer_.insert(buffer_.end(), length, length + sizeof(header_bytes));
    buffer_.insert(buffer_.end(), header.begin(), header.end());
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!published_) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(std::string_view name, const void* data, std::size_t bytes) {
  CHECK(!finished_, "[safetensors] {}: write after the end", path_.string());
  while (current_ < tensors_.size() && written_ == tensors_[current_].end &&
         tensors_[current_].name != name) {
    ++current_;
  }
  CHECK(current_ < tensors_.size() && tensors_[current_].name == name,
        "[safetensors] {}: got bytes of {}, wanted those of {}", path_.string(), name,
        current_ < tensors_.size() ? tensors_[current_].name : "no further tensor");
  CHECK(bytes <= tensors_[current_].end - written_,
        "[safetensors] {}: got {} bytes of {}, {} are left", path_.string(), bytes, name,
        tensors_[current_].end - written_);
  if (bytes >= kBufferBytes / 4) {
    flush();
    write_all(file_, data, bytes, path_, kWho);
  } else {
    if (buffer_.size() + bytes > kBufferBytes) flush();
    const auto* begin = static_cast<const char*>(data);
    buffer_.insert(buffer_.end(), begin, begin + bytes);
  }
  written_ += bytes;
}

void SafetensorsWriter::flush() {
  write_all(file_, buffer_.data(), buffer_.size(), path_, kWho);
  buffer_.clear();
}

void SafetensorsWriter::finish() {
  if (finished_) return;
  const std::uint64_t total = tensors_.empty() ? 0 : tensors_.back().end;
  CHECK(written_ == total, "[safetensors] {}: {} of {} bytes were written; {} is not complete",
        path_.string(), written_, total, tensors_[std::min(current_, tensors_.size() - 1)].name);
  flush();
  sync_file(file_, path_, kWho);
  file_.reset();
  buffer_ = {};
  finished_ = true;
}

void SafetensorsWriter::publish() {
  CHECK(finished_ && !published_, "[safetensors] {}: published before its end or twice",
        path_.string());
  rename_file(temporary_, path_, kWho);
  published_ = true;
}

void SafetensorsWriter::commit() {
  finish();
  publish();
  sync_folder(path_.parent_path(), kWho);
}

SafetensorsFolderWriter::SafetensorsFolderWriter(fs::path folder,
                                                 std::vector<SafetensorsSpec> tensors,
                                                 std::uint64_t max_shard_bytes,
                                                 std::string_view stem, SafetensorsOptions options)
    : folder_(std::move(folder)), stem_(stem), options_(std::move(options)) {
  CHECK_USER(max_shard_bytes > 0, "[safetensors] max_shard_bytes is 0, wanted at least 1");
  create_folders(folder_, kWho);
  std::uint64_t bytes = 0;
  for (SafetensorsSpec& tensor : tensors) {
    const std::uint64_t size = tensor.bytes();
    const bool fits =
        !shards_.empty() && size <= max_shard_bytes && bytes <= max_shard_bytes - size;
    if (!fits) {
      shards_.emplace_back();
      bytes = 0;
    }
    bytes += size;
    CHECK(shard_of_name_.emplace(tensor.name, shards_.size() - 1).second,
          "[safetensors] tensor {} is in the list twice", tensor.name);
    shards_.back().tensors.push_back(std::move(tensor));
  }
  if (shards_.empty()) shards_.emplace_back();
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].file_name = shard_name(stem_, i, shards_.size());
  }
  remove_temporaries_of_dead_saves();
  open_shard(0);
}

SafetensorsFolderWriter::~SafetensorsFolderWriter() = default;

void SafetensorsFolderWriter::open_shard(std::size_t index) {
  Shard& shard = shards_[index];
  shard.writer =
      std::make_unique<SafetensorsWriter>(folder_ / shard.file_name, shard.tensors, options_);
}

void SafetensorsFolderWriter::write(std::string_view name, const void* data, std::size_t bytes) {
  const auto found = shard_of_name_.find(name);
  CHECK(found != shard_of_name_.end(), "[safetensors] {}: tensor {} is not in the list",
        folder_.string(), name);
  CHECK(found->second >= current_, "[safetensors] {}: got bytes of {} after its shard was complete",
        folder_.string(), name);
  while (current_ < found->second) {
    shards_[current_].writer->finish();
    open_shard(++current_);
  }
  shards_[current_].writer->write(name, data, bytes);
}

void SafetensorsFolderWriter::commit() {
  CHECK(!committed_, "[safetensors] {}: committed twice", folder_.string());
  shards_[current_].writer->finish();
  while (current_ + 1 < shards_.size()) {  // shards of nothing but empty tensors
    open_shard(++current_);
    shards_[current_].writer->finish();
  }
  const fs::path index = folder_ / shard_index_name(stem_);
  remove_file(index, kWho);
  // One file replaces one file in a single step; any other change passes through "no model here".
  if (shards_.size() > 1) remove_file(folder_ / shard_name(stem_, 0, 1), kWho);
  sync_folder(folder_, kWho);
  for (const Shard& shard : shards_) shard.writer->publish();
  sync_folder(folder_, kWho);
  if (shards_.size() > 1) write_index();
  remove_earlier_save();
  sync_folder(folder_, kWho);
  committed_ = true;
}

void SafetensorsFolderWriter::write_index() const {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::uint64_t total = 0;
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const auto& [name, shard] : shard_of_name_) map[name] = shards_[shard].file_name;
  for (const Shard& shard : shards_) {
    for (const SafetensorsSpec& tensor : shard.tensors) total += tensor.bytes();
  }
  json["metadata"]["total_size"] = total;
  json["weight_map"] = std::move(map);
  replace_file(folder_ / shard_index_name(stem_), json.dump(2) + "\n", kWho);
}

void SafetensorsFolderWriter::remove_earlier_save() const {
  std::set<std::string, std::less<>> ours;
  for (const Shard& shard : shards_) ours.insert(shard.file_name);
  for (const std::string& name : file_names_in(folder_)) {
    if (is_shard_name(name, stem_) && !ours.contains(name)) remove_file(folder_ / name, kWho);
  }
}

void SafetensorsFolderWriter::remove_temporaries_of_dead_saves() const {
  // Two live saves into one folder would destroy each other in any case, so whatever another
  // process left is from a save that was killed.
  const std::string own_suffix = ".tmp-" + std::to_string(::getpid());
  for (const std::string& name : file_names_in(folder_)) {
    const std::size_t suffix = name.rfind(".tmp-");
    if (suffix == std::string::npos || !name.starts_with('.') || name.ends_with(own_suffix)) {
      continue;
    }
    const std::string_view target = std::string_view(name).substr(1, suffix - 1);
    if (is_shard_name(target, stem_) || target == shard_name(stem_, 0, 1) ||
        target == shard_index_name(stem_)) {
      remove_file(folder_ / name, kWho);
    }
  }
}

}  // namespace tessera
