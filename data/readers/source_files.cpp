#include "data/readers/source_files.h"

#include <glob.h>

#include <algorithm>
#include <array>
#include <set>
#include <system_error>

#include "data/readers/byte_stream.h"
#include "data/readers/json_reader.h"
#include "data/readers/line_reader.h"
#include "data/readers/parquet_reader.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::array kTextNames = {".txt", ".text", ".md"};
constexpr std::array kJsonNames = {".jsonl", ".json", ".ndjson"};

// The extension in lower case, with .gz and .zst taken off first.
std::string inner_extension(const fs::path& path) {
  fs::path name = path.filename();
  const auto lower = [](std::string text) {
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text;
  };
  std::string extension = lower(name.extension().string());
  if (extension == ".gz" || extension == ".zst" || extension == ".zstd") {
    extension = lower(name.stem().extension().string());
  }
  return extension;
}

template <std::size_t N>
bool is_one_of(const std::string& extension, const std::array<const char*, N>& names) {
  return std::find(names.begin(), names.end(), extension) != names.end();
}

bool is_megatron(const fs::path& path) {
  fs::path index = path;
  index.replace_extension(".idx");
  return path.extension() == ".bin" && fs::exists(index);
}

bool has_known_name(const fs::path& path) {
  const std::string extension = inner_extension(path);
  return is_one_of(extension, kTextNames) || is_one_of(extension, kJsonNames) ||
         extension == ".tokens" || extension == ".parquet" || is_megatron(path);
}

// How the records of a JSON file are laid out, from its first line with something on it.
FileFormat json_layout(const fs::path& path) {
  LineReader lines(path);
  std::string line;
  while (lines.next(line, std::size_t{64} << 20)) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    if (line[first] == '[') return FileFormat::kJsonArray;
    if (line[first] != '{' || inner_extension(path) != ".json") return FileFormat::kJsonLines;
    // .json is used for one object over many lines and for JSON lines alike.
    try {
      JsonReader reader(line);
      reader.skip_value();
      return FileFormat::kJsonLines;
    } catch (const JsonProblem& problem) {
      const bool is_cut = problem.offset + 1 >= line.size() ||
                          std::string(problem.what()).find("does not end") != std::string::npos;
      return is_cut ? FileFormat::kJsonObject : FileFormat::kJsonLines;
    }
  }
  return FileFormat::kJsonLines;
}

FileFormat detect_by_content(const fs::path& path) {
  const auto stream = open_stream(path);
  std::string head(4096, '\0');
  std::size_t size = 0;
  while (size < head.size()) {
    const std::size_t got = stream->read(head.data() + size, head.size() - size);
    if (got == 0) break;
    size += got;
  }
  head.resize(size);
  if (head.starts_with("PAR1")) return FileFormat::kParquet;
  const std::size_t bad = find_invalid_utf8(head);
  // A character cut by the end of the sample is no fault.
  const bool is_text = bad == std::string::npos || (size == 4096 && bad + 4 > size);
  CHECK_USER(is_text && head.find('\0') == std::string::npos,
             "[data] the format of {} is unclear: its name says nothing and it is not UTF-8 text; "
             "set format to text, lines, paragraphs, json, parquet, tokens or megatron",
             path.string());
  std::size_t first = head.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  first = head.find_first_not_of(" \t\r\n", first);
  if (first != std::string::npos && (head[first] == '{' || head[first] == '[')) {
    return json_layout(path);
  }
  return FileFormat::kText;
}

FileFormat detect_format(const fs::path& path) {
  const std::string extension = inner_extension(path);
  if (is_one_of(extension, kTextNames)) return FileFormat::kText;
  if (is_one_of(extension, kJsonNames)) return json_layout(path);
  if (extension == ".tokens") return FileFormat::kTokens;
  if (is_megatron(path)) return FileFormat::kMegatron;
  CHECK_USER(extension != ".bin", "[data] {} has no .idx file beside it, expected {}",
             path.string(), fs::path(path).replace_extension(".idx").string());
  if (extension == ".parquet") return FileFormat::kParquet;
  CHECK_USER(extension != ".arrow" && extension != ".csv" && extension != ".tsv",
             "[data] {} is a {} file, which is not read; convert it to JSON lines", path.string(),
             extension);
  return detect_by_content(path);
}

FileFormat chosen_format(const fs::path& path, const std::string& format) {
  if (format == "text") return FileFormat::kText;
  if (format == "lines") return FileFormat::kLines;
  if (format == "paragraphs") return FileFormat::kParagraphs;
  if (format == "json") return json_layout(path);
  if (format == "tokens") return FileFormat::kTokens;
  if (format == "megatron") return FileFormat::kMegatron;
  if (format == "parquet") return FileFormat::kParquet;
  CHECK(format == "auto", "[data] unknown format {}", format);
  return detect_format(path);
}

SourceFile describe(const fs::path& path, const std::string& format) {
  SourceFile file;
  std::error_code code;
  file.path = fs::canonical(path, code);
  CHECK_USER(!code, "[data] {} cannot be read: {}", path.string(), code.message());
  CHECK_USER(fs::is_regular_file(file.path), "[data] {} is not a regular file", path.string());
  file.bytes = static_cast<std::int64_t>(fs::file_size(file.path));
  file.is_compressed = detect_compression(file.path) != Compression::kNone;
  file.format = chosen_format(file.path, format);
  if (file.format == FileFormat::kParquet) require_parquet(path);
  return file;
}

std::vector<fs::path> files_in(const fs::path& folder, const std::string& format) {
  std::vector<fs::path> files;
  std::vector<std::string> others;
  std::error_code code;
  auto entry = fs::recursive_directory_iterator(
      folder, fs::directory_options::follow_directory_symlink, code);
  CHECK_USER(!code, "[data] {} cannot be read: {}", folder.string(), code.message());
  for (const auto end = fs::recursive_directory_iterator(); entry != end; entry.increment(code)) {
    CHECK_USER(!code, "[data] {} cannot be read: {}", folder.string(), code.message());
    const std::string name = entry->path().filename().string();
    if (name.starts_with(".")) {
      if (entry->is_directory()) entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file()) continue;
    const bool wanted = format == "tokens"     ? entry->path().extension() == ".tokens"
                        : format == "megatron" ? is_megatron(entry->path())
                                               : has_known_name(entry->path());
    if (wanted) {
      files.push_back(entry->path());
    } else if (others.size() < 5) {
      others.push_back(name);
    }
  }
  CHECK_USER(
      !files.empty(),
      "[data] folder {} holds no file of a known name (.txt, .md, .jsonl, .json, .parquet, "
      ".tokens, "
      ".bin with .idx; also .gz and .zst){}",
      folder.string(),
      others.empty() ? "" : "; it holds " + join_choices(others) + ": name them by a pattern");
  return files;
}

std::vector<fs::path> files_matching(const std::string& pattern) {
  glob_t found{};
  const int code = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  std::vector<fs::path> files;
  for (std::size_t i = 0; code == 0 && i < found.gl_pathc; ++i)
    files.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  CHECK_USER(!files.empty(), "[data] no file matches {}", pattern);
  return files;
}

}  // namespace

const char* name_of(FileFormat format) {
  switch (format) {
    case FileFormat::kText:
      return "text";
    case FileFormat::kLines:
      return "lines";
    case FileFormat::kParagraphs:
      return "paragraphs";
    case FileFormat::kJsonLines:
      return "JSON lines";
    case FileFormat::kJsonArray:
      return "JSON array";
    case FileFormat::kJsonObject:
      return "JSON object";
    case FileFormat::kTokens:
      return "tokens";
    case FileFormat::kMegatron:
      return "Megatron";
    case FileFormat::kParquet:
      return "Parquet";
  }
  return "?";
}

std::vector<SourceFile> find_source_files(const std::string& path, const std::string& format) {
  CHECK_USER(!path.empty(), "[data] a source has no path");
  std::vector<fs::path> found;
  std::error_code code;
  if (fs::exists(path, code)) {
    found = fs::is_directory(path) ? files_in(path, format) : std::vector<fs::path>{path};
  } else {
    CHECK_USER(path.find_first_of("*?[") != std::string::npos, "[data] {} does not exist", path);
    for (const fs::path& match : files_matching(path)) {
      if (!fs::is_directory(match)) {
        found.push_back(match);
      } else {
        for (const fs::path& file : files_in(match, format)) found.push_back(file);
      }
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<SourceFile> files;
  std::set<fs::path> seen;
  for (const fs::path& file : found) {
    SourceFile described = describe(file, format);
    if (seen.insert(described.path).second) files.push_back(std::move(described));
  }
  return files;
}

}  // namespace tessera
