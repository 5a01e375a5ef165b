#include "engine/train/gemm_choices_cache.h"

#include <fmt/format.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "kernels/gemm_choices.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

fs::path cache_root() {
  if (const char* root = std::getenv("XDG_CACHE_HOME"); root != nullptr && *root != '\0')
    return root;
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return fs::path(home) / ".cache";
  }
  return {};
}

// "NVIDIA H200" of library 130101 as a file name.
std::string name_of_kind(const std::string& choices) {
  const auto json = nlohmann::json::parse(choices);
  std::string name = json.at("gpu").get<std::string>();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '-';
  }
  return fmt::format("{}-{}", name, json.at("library").get<std::int64_t>());
}

}  // namespace

GemmChoicesCache::GemmChoicesCache(BackendContext& context, int rank) : context_(&context) {
  kept_ = export_gemm_choices(context);
  const fs::path root = cache_root();
  if (kept_.empty() || root.empty()) return;
  path_ = root / "tessera" / "gemm" / fmt::format("{}-rank{}.json", name_of_kind(kept_), rank);
  std::ifstream file(path_);
  if (!file) return;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  try {
    import_gemm_choices(context, text);
    kept_ = export_gemm_choices(context);
  } catch (const Error& error) {
    log::warning("{}: {}; the algorithms are chosen anew", path_.string(), error.what());
  }
}

void GemmChoicesCache::save() {
  if (path_.empty()) return;
  std::string now = export_gemm_choices(*context_);
  if (now == kept_) return;
  std::error_code error;
  fs::create_directories(path_.parent_path(), error);
  // Another run may read it: it appears whole.
  const fs::path draft = path_.string() + ".new";
  std::ofstream file(draft, std::ios::trunc);
  file << now;
  file.close();
  if (file) fs::rename(draft, path_, error);
  if (!file || error) {
    log::warning("[gemm] the choices of algorithms cannot be kept in {}", path_.string());
    return;
  }
  kept_ = std::move(now);
}

}  // namespace tessera
