#include "parallel/mpi_loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

namespace tessera {
namespace {

constexpr std::size_t kBroadcastBytes = 4096;

std::vector<std::filesystem::path> candidates() {
  const char* given = std::getenv("TESSERA_MPI_MODULE");
  if (given != nullptr && *given != '\0') return {given};
  std::error_code ignored;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  return {folder / "libtessera_mpi.so", folder / ".." / "lib" / "libtessera_mpi.so"};
}

}  // namespace

std::unique_ptr<MpiModule> MpiModule::load(std::string* problem) {
  problem->clear();
  for (const auto& path : candidates()) {
    if (!std::filesystem::exists(path)) {
      *problem += fmt::format("{}{} is not there", problem->empty() ? "" : "; ", path.string());
      continue;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      *problem += fmt::format("{}{}", problem->empty() ? "" : "; ", dlerror());
      continue;
    }
    const auto entry =
        reinterpret_cast<const MpiModuleTable* (*)()>(dlsym(library, "tessera_mpi_module"));
    if (entry == nullptr || entry()->version != MpiModuleTable::kVersion) {
      *problem = fmt::format("{} belongs to another version of this program", path.string());
      return nullptr;
    }
    std::unique_ptr<MpiModule> module(new MpiModule());
    module->table_ = entry();
    char words[MpiModuleTable::kProblemBytes] = {};
    if (module->table_->start(&module->rank_, &module->size_, &module->local_rank_, words) != 0) {
      *problem = words;
      return nullptr;
    }
    return module;
  }
  return nullptr;
}

std::string MpiModule::broadcast(const std::string& text) {
  char buffer[kBroadcastBytes] = {};
  CHECK(text.size() < kBroadcastBytes, "[mpi] {} bytes are too many to broadcast", text.size());
  std::memcpy(buffer, text.data(), text.size());
  char words[MpiModuleTable::kProblemBytes] = {};
  if (table_->broadcast(buffer, kBroadcastBytes, words) != 0)
    throw Error(ErrorKind::kTransient, words);
  return buffer;
}

std::unique_ptr<Communicator> MpiModule::make_world(double timeout_seconds) {
  char words[MpiModuleTable::kProblemBytes] = {};
  std::unique_ptr<Communicator> world(table_->make_world(timeout_seconds, words));
  if (world == nullptr) throw Error(ErrorKind::kTransient, words);
  return world;
}

void MpiModule::finish() { table_->finish(); }
void MpiModule::abort(int exit_code) { table_->abort(exit_code); }

}  // namespace tessera
