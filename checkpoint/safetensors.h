// Reader of one safetensors file: 8 bytes of little-endian header length, a JSON header, then the
// tensors' bytes without holes (format: github.com/huggingface/safetensors). The header is taken as
// hostile: nothing in it is believed before it is checked against the file's true size.
//
// A file that breaks the format is kUser and names the file and the tensor; a failing disk is
// kTransient.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/posix_file.h"
#include "engine/core/dtype.h"

namespace tessera {

// The format is little-endian and bytes go to memory as they are.
static_assert(std::endian::native == std::endian::little,
              "safetensors files are little-endian; this machine would need a byte swap");

// One tensor of a file. Row-major and dense; rank 0 and dims of 0 are legal.
struct SafetensorsTensor {
  std::string name;
  std::string stored_dtype;    // as the file spells it: "F32", "BF16", "I16", ...
  std::optional<DType> dtype;  // empty for a type that this engine cannot read (I16, BOOL, ...)
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes [begin, end) of the file's data part
  std::uint64_t end = 0;

  std::uint64_t bytes() const { return end - begin; }
  std::int64_t numel() const;
  std::int64_t rows() const;  // product of all dims but the last; 1 for rank 0 and 1
  std::int64_t cols() const;  // the last dim; 1 for rank 0
};

// "F32" and the like; empty for a dtype that the format does not have.
std::string_view safetensors_name(DType dtype);

// Rows [row_begin, row_begin + row_count) by columns [col_begin, col_begin + col_count) of a tensor
// seen as [rows(), cols()].
struct TensorRectangle {
  std::int64_t row_begin = 0;
  std::int64_t row_count = 0;
  std::int64_t col_begin = 0;
  std::int64_t col_count = 0;
};

// An open file. Reads take no lock and may run on many threads; one object serves a whole process.
class SafetensorsFile {
 public:
  // The header's largest length, as in the reference library.
  static constexpr std::uint64_t kLargestHeader = 100'000'000;

  // Opens the file, reads the header and checks all of it; reads no tensor.
  explicit SafetensorsFile(std::filesystem::path path);
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  const std::filesystem::path& path() const { return path_; }
  // In the order of their bytes.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::uint64_t data_start() const { return data_start_; }  // offset of the data part in the file

  const SafetensorsTensor* find(std::string_view name) const;
  // kUser if it is not there.
  const SafetensorsTensor& get(std::string_view name) const;

  // Bytes [first, first + bytes) of the tensor.
  void read_bytes(const SafetensorsTensor& tensor, std::uint64_t first, std::size_t bytes,
                  void* destination) const;
  // Elements [first, first + count) in row-major order. Needs tensor.dtype.
  void read_elements(const SafetensorsTensor& tensor, std::int64_t first, std::int64_t count,
                     void* destination) const;
  // The rectangle, its rows `destination_stride` elements apart (0: dense). Needs tensor.dtype. The
  // disk sees few large reads: whole rows are fetched through a bounded buffer where the wanted
  // part of each is short.
  void read_rectangle(const SafetensorsTensor& tensor, const TensorRectangle& rectangle,
                      void* destination, std::int64_t destination_stride = 0) const;

 private:
  std::size_t element_size(const SafetensorsTensor& tensor) const;

  std::filesystem::path path_;
  FileHandle file_;
  std::uint64_t data_start_ = 0;
  std::vector<SafetensorsTensor> tensors_;
  std::unordered_map<std::string, std::size_t> index_of_name_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace tessera
