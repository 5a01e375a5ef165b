// tessera doctor: what this machine offers a run, and what to change where something is in the way.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/commands/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct Check {
  std::string name;
  std::string found;
  std::string advice;  // what to change; empty: nothing, the check is OK
};
using Checks = std::vector<Check>;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// Standard output of a shell command, empty where it failed.
std::string output_of(const std::string& command) {
  std::string text;
  std::FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return text;
  char part[4096];
  while (std::fgets(part, sizeof part, pipe) != nullptr) text += part;
  return pclose(pipe) == 0 ? text : std::string();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

// The fields of a line of `nvidia-smi --format=csv,noheader,nounits`.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream stream(line);
  for (std::string field; std::getline(stream, field, ',');) {
    const std::size_t begin = field.find_first_not_of(' ');
    fields.push_back(begin == std::string::npos ? "" : field.substr(begin));
  }
  return fields;
}

// Whether the PCI bus shows a display or 3D controller of NVIDIA (vendor 10de, class 03).
bool has_nvidia_hardware() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/sys/bus/pci/devices", ignored)) {
    std::string vendor, device_class;
    std::ifstream(entry.path() / "vendor") >> vendor;
    std::ifstream(entry.path() / "class") >> device_class;
    if (vendor == "0x10de" && device_class.rfind("0x03", 0) == 0) return true;
  }
  return fs::exists("/dev/nvidiactl", ignored);
}

// Symbol `symbol` of the first of `names` that loads; null where none does. The library stays.
void* find_symbol(const std::vector<const char*>& names, const char* symbol) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return dlsym(library, symbol);
  }
  return nullptr;
}

// A version by `int f(int*)`, the form of the driver, the runtime and NCCL; 0 where not found.
int version_by_pointer(const std::vector<const char*>& names, const char* symbol) {
  const auto get = reinterpret_cast<int (*)(int*)>(find_symbol(names, symbol));
  int version = 0;
  return get != nullptr && get(&version) == 0 ? version : 0;
}

// A version by `size_t f()`, the form of cuBLASLt and cuDNN; 0 where not found.
int version_by_value(const std::vector<const char*>& names, const char* symbol) {
  const auto get = reinterpret_cast<std::size_t (*)()>(find_symbol(names, symbol));
  return get != nullptr ? static_cast<int>(get()) : 0;
}

void check_gpus(Checks& checks) {
  const std::vector<std::string> gpus =
      lines_of(output_of("nvidia-smi --query-gpu=index,name,driver_version,compute_cap,memory.free,"
                         "memory.total --format=csv,noheader,nounits"));
  const int usable = cuda_device_count();
  if (gpus.empty() && usable == 0) {
    const bool present = has_nvidia_hardware();
    checks.push_back(
        {"gpu", present ? "an NVIDIA device that no driver serves" : "none: runs use the CPU",
         present ? "install the NVIDIA driver, or give the container its devices" : ""});
    return;
  }
  for (const std::string& line : gpus) {
    const std::vector<std::string> field = fields_of(line);
    if (field.size() < 6) continue;
    const double capability = std::atof(field[3].c_str());
    const double free = std::atof(field[4].c_str()), total = std::atof(field[5].c_str());
    std::string advice;
    if (capability < 8.0) {
      advice = "bf16 needs compute capability 8.0 or newer: use another GPU";
    } else if (free < 0.9 * total) {
      advice = "other processes hold its memory: end them or leave it out (CUDA_VISIBLE_DEVICES)";
    }
    checks.push_back(
        {"gpu " + field[0],
         fmt::format(
             "{}, driver {}, compute capability {} (bf16 {}, FP8 {}), {:.0f} of {:.0f} MiB free",
             field[1], field[2], field[3], capability >= 8.0 ? "yes" : "no",
             capability >= 8.9 ? "yes" : "no", free, total),
         advice});
  }
  checks.push_back(
      {"usable gpus", std::to_string(usable),
       usable > 0 ? ""
                  : "build with -DTESSERA_CUDA=ON, and see that CUDA_VISIBLE_DEVICES names a GPU"});
  const int driver = version_by_pointer({"libcuda.so.1"}, "cuDriverGetVersion");
  checks.push_back(
      {"cuda driver",
       driver > 0 ? fmt::format("CUDA {}.{}", driver / 1000, driver % 1000 / 10) : "not found",
       driver > 0 ? "" : "install the NVIDIA driver (libcuda.so.1)"});
  const int runtime =
      version_by_pointer({"libcudart.so.13", "libcudart.so.12"}, "cudaRuntimeGetVersion");
  // A program that carries the runtime inside has no library to ask.
  checks.push_back({"cuda runtime",
                    runtime > 0 ? fmt::format("CUDA {}.{}", runtime / 1000, runtime % 1000 / 10)
                                : "no shared library (the program may carry its own)",
                    runtime / 1000 > driver / 1000 && driver > 0
                        ? "the runtime is newer than the driver: update the driver"
                        : ""});
  const int lt = version_by_value({"libcublasLt.so.13", "libcublasLt.so.12"}, "cublasLtGetVersion");
  checks.push_back({"cublaslt", lt > 0 ? std::to_string(lt) : "not found",
                    lt > 0 ? "" : "put libcublasLt on LD_LIBRARY_PATH"});
  const int dnn = version_by_value({"libcudnn.so.9"}, "cudnnGetVersion");
  checks.push_back(
      {"cudnn",
       dnn > 0 ? fmt::format("{}.{}.{}", dnn / 10000, dnn % 10000 / 100, dnn % 100) : "not found",
       dnn > 0 ? "" : "put libcudnn.so.9 on LD_LIBRARY_PATH"});
  const int nccl = version_by_pointer({"libnccl.so.2"}, "ncclGetVersion");
  const bool needs_nccl = gpus.size() > 1;
  checks.push_back(
      {"nccl",
       nccl > 0 ? fmt::format("{}.{}.{}", nccl / 10000, nccl % 10000 / 100, nccl % 100)
                : "not found",
       nccl > 0 || !needs_nccl ? "" : "put libnccl.so.2 on LD_LIBRARY_PATH: several GPUs need it"});
  if (gpus.size() < 2) return;
  // The rows of the matrix are "GPU0  X  NV18 ...": one column per GPU first.
  bool all_linked = true, known = false;
  for (const std::string& line : lines_of(output_of("nvidia-smi topo -m"))) {
    std::istringstream row(line);
    std::string word;
    if (!(row >> word) || word.rfind("GPU", 0) != 0) continue;
    std::vector<std::string> cells;
    while (cells.size() < gpus.size() && row >> word) cells.push_back(word);
    if (cells.size() < gpus.size() || std::count(cells.begin(), cells.end(), "X") != 1) continue;
    known = true;
    for (const std::string& cell : cells) all_linked &= cell == "X" || cell.rfind("NV", 0) == 0;
  }
  checks.push_back(
      {"nvlink",
       !known       ? "unknown (no nvidia-smi topo)"
       : all_linked ? "between all GPUs"
                    : "not between all GPUs",
       !known || all_linked
           ? ""
           : "keep parallel.tensor within linked GPUs (nvidia-smi topo -m shows them)"});
}

double meminfo_gib(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0)
      return std::atof(line.c_str() + key.size() + 1) / (1024.0 * 1024.0);
  }
  return 0;
}

void check_host(Checks& checks) {
  const double available = meminfo_gib("MemAvailable");
  checks.push_back(
      {"host memory",
       fmt::format("{:.1f} of {:.1f} GiB available", available, meminfo_gib("MemTotal")),
       available >= 2 ? "" : "less than 2 GiB: end other programs"});
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  std::string quota;
  double period = 0;
  std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period;
  const double limit = period > 0 && quota != "max" ? std::atof(quota.c_str()) / period : cores;
  checks.push_back(
      {"cores",
       limit < cores ? fmt::format("{}, of which the container gets {:.1f}", cores, limit)
                     : std::to_string(cores),
       limit < cores
           ? "threads would wait for each other: start with taskset, or raise the limit of cpus"
           : ""});
  struct statvfs shm {};
  const double shm_bytes =
      statvfs("/dev/shm", &shm) == 0 ? double(shm.f_bavail) * double(shm.f_frsize) : 0;
  checks.push_back(
      {"/dev/shm", fmt::format("{:.2f} GiB free", shm_bytes / kGiB),
       shm_bytes >= kGiB ? "" : "ranks as processes share memory there: docker run --shm-size=8g"});
  rlimit files{}, space{};
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_AS, &space);
  checks.push_back({"open files",
                    files.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(files.rlim_cur),
                    files.rlim_cur >= 1024 ? "" : "ulimit -n 4096"});
  checks.push_back({"address space",
                    space.rlim_cur == RLIM_INFINITY
                        ? "unlimited"
                        : fmt::format("{:.1f} GiB", double(space.rlim_cur) / kGiB),
                    space.rlim_cur == RLIM_INFINITY ? "" : "ulimit -v unlimited"});
}

// Writes `bytes` to a file without a name in the current folder; bytes per second, 0 on an error.
double write_speed(std::size_t bytes) {
  char name[] = "./.tessera-doctor-XXXXXX";
  const int file = mkstemp(name);
  if (file < 0) return 0;
  unlink(name);
  const std::vector<char> part(std::size_t{1} << 20, 'x');
  const auto start = std::chrono::steady_clock::now();
  bool good = true;
  for (std::size_t done = 0; good && done < bytes; done += part.size()) {
    good = write(file, part.data(), part.size()) == static_cast<ssize_t>(part.size());
  }
  good = good && fsync(file) == 0;
  close(file);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return good ? static_cast<double>(bytes) / taken.count() : 0;
}

void check_disk(Checks& checks) {
  struct statvfs disk {};
  const double free = statvfs(".", &disk) == 0 ? double(disk.f_bavail) * double(disk.f_frsize) : 0;
  checks.push_back({"disk", fmt::format("{:.1f} GiB free here", free / kGiB),
                    free >= 10 * kGiB
                        ? ""
                        : "less than 10 GiB: put run.dir and data.cache_dir on another disk"});
  const std::size_t bytes = std::size_t{128} << 20;
  const double speed = free > 2.0 * double(bytes) ? write_speed(bytes) : 0;
  checks.push_back({"disk write",
                    speed > 0 ? fmt::format("{:.0f} MB/s (128 MiB with fsync)", speed / 1e6)
                              : "not possible here",
                    speed >= 50e6 ? ""
                    : speed > 0
                        ? "slow: checkpoints will take long; use a local disk"
                        : "the current folder cannot be written or is full: change to another"});
}

void check_mpi(Checks& checks) {
  std::vector<fs::path> places;
  std::error_code ignored;
  if (const char* named = std::getenv("TESSERA_MPI_MODULE")) {
    places = {named};
  } else {
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    places = {folder / "libtessera_mpi.so", folder / ".." / "lib" / "libtessera_mpi.so"};
  }
  // Opened, not started: MPI_Init belongs to a run under mpirun.
  std::string found = "no module: runs start without mpirun", advice;
  for (const fs::path& place : places) {
    if (!fs::exists(place, ignored)) continue;
    if (dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) {
      found = place.lexically_normal().string();
    } else {
      found = dlerror();
      advice = "install the MPI library that the module was built with";
    }
    break;
  }
  checks.push_back({"mpi", found, advice});
}

int run(bool as_json) {
  Checks checks;
  check_gpus(checks);
  check_host(checks);
  check_disk(checks);
  check_mpi(checks);
  const bool good =
      std::all_of(checks.begin(), checks.end(), [](const Check& c) { return c.advice.empty(); });
  if (as_json) {
    nlohmann::ordered_json json;
    json["ok"] = good;
    json["checks"] = nlohmann::ordered_json::array();
    for (const Check& c : checks) {
      json["checks"].push_back(
          {{"name", c.name}, {"ok", c.advice.empty()}, {"found", c.found}, {"advice", c.advice}});
    }
    std::printf("%s\n", json.dump().c_str());
  } else {
    for (const Check& c : checks) {
      std::printf("%-4s  %-14s %s%s%s\n", c.advice.empty() ? "OK" : "WARN", c.name.c_str(),
                  c.found.c_str(), c.advice.empty() ? "" : ": ", c.advice.c_str());
    }
  }
  return good ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& code) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand(
      "doctor",
      "Check GPUs, libraries, memory and disk of this machine; exit code 1 where a line warns");
  command->add_flag("--json", *as_json, "One JSON object instead of lines");
  command->callback([as_json, &code] { code = run(*as_json); });
}

}  // namespace tessera
