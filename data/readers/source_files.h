// From what a user writes as a path to the files behind it and their formats.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

enum class FileFormat {
  kText,        // the file is one document; <|endoftext|> separates several
  kLines,       // a line is a document
  kParagraphs,  // blank lines separate documents
  kJsonLines,   // one record a line
  kJsonArray,   // [record, record, ...]
  kJsonObject,  // one record over several lines
  kTokens,      // a token file of ours (data/token_store.h)
  kMegatron,    // .bin with .idx
  kParquet,     // one record a row
};

const char* name_of(FileFormat format);

struct SourceFile {
  std::filesystem::path path;
  FileFormat format = FileFormat::kText;
  bool is_compressed = false;
  std::int64_t bytes = 0;  // as stored
};

// The files of `path`: a file, a folder (searched through, hidden files and files of no known name
// left out), or a pattern with * ? [ ]. Sorted by name, each once. `format` is DataSource::format;
// `auto` goes by name and content. Throws kUser if nothing is found or a format is unclear.
std::vector<SourceFile> find_source_files(const std::string& path, const std::string& format);

}  // namespace tessera
