// Files as the checkpoint layer needs them: a descriptor that closes itself, reads and writes that
// finish or throw, and replacement of a file in one step.
//
// Errors of the operating system are kTransient with the path, the system's text and, for a full or
// read-only disk, what to change. A path the user gave that is not there is kUser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// Owns a file descriptor. Moving leaves an empty handle.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  ~FileHandle();
  FileHandle(FileHandle&& other) noexcept;
  FileHandle& operator=(FileHandle&& other) noexcept;

  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  void reset() noexcept;

 private:
  int descriptor_ = -1;
};

// `who` begins every message: "safetensors" gives "[safetensors] ...".

// Opens a regular file for reading; kUser if it is missing, a folder or not readable by this user.
FileHandle open_for_reading(const std::filesystem::path& path, std::string_view who);

// Creates or truncates a file for writing.
FileHandle create_for_writing(const std::filesystem::path& path, std::string_view who);

std::uint64_t file_size(const FileHandle& file, const std::filesystem::path& path,
                        std::string_view who);

// Reads exactly `bytes` at `offset`; a file that ends earlier is an error. Safe from many threads.
void read_at(const FileHandle& file, std::uint64_t offset, void* destination, std::size_t bytes,
             const std::filesystem::path& path, std::string_view who);

// Appends at the descriptor's position.
void write_all(const FileHandle& file, const void* data, std::size_t bytes,
               const std::filesystem::path& path, std::string_view who);

void sync_file(const FileHandle& file, const std::filesystem::path& path, std::string_view who);
// Makes the folder's entries (a rename, a removal) last.
void sync_folder(const std::filesystem::path& folder, std::string_view who);
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to,
                 std::string_view who);
// Not an error when it is already gone.
void remove_file(const std::filesystem::path& path, std::string_view who);
void create_folders(const std::filesystem::path& folder, std::string_view who);

// The name a file has until it is complete: beside `path`, hidden, with the process in it.
std::filesystem::path temporary_name(const std::filesystem::path& path);

// Writes `text` so that `path` holds either its old content or all of the new one, also after a
// crash: temporary file, fsync, rename, fsync of the folder.
void replace_file(const std::filesystem::path& path, std::string_view text, std::string_view who);

// The whole file; refuses more than `limit` bytes.
std::string read_text_file(const std::filesystem::path& path, std::uint64_t limit,
                           std::string_view who);

}  // namespace tessera
