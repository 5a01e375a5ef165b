// The MPI module: a shared library beside the program that is loaded when a launcher with MPI
// started it, so that the program itself starts where libmpi is missing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace tessera {

// What the module exports, as `const MpiModuleTable* tessera_mpi_module()` with C linkage.
// Functions that can fail return 0 or put words into `problem`, which holds kProblemBytes.
struct MpiModuleTable {
  static constexpr int kVersion = 1;
  static constexpr std::size_t kProblemBytes = 1024;

  int version;
  // MPI_Init_thread, once per process.
  int (*start)(int* rank, int* size, int* local_rank, char* problem);
  // Copies the bytes of rank 0 to every rank; blocks.
  int (*broadcast)(void* data, std::size_t bytes, char* problem);
  // A group of all ranks for CPU streams; null on failure.
  Communicator* (*make_world)(double timeout_seconds, char* problem);
  // MPI_Finalize if no operation was left unfinished, nothing otherwise.
  void (*finish)();
  // Ends all ranks at once with this exit code.
  void (*abort)(int exit_code);
};

class MpiModule {
 public:
  // Looks for libtessera_mpi.so at $TESSERA_MPI_MODULE, beside the program and in ../lib from
  // there. Null with the reason in `problem` if it or libmpi is missing. The module stays loaded
  // for the life of the process.
  static std::unique_ptr<MpiModule> load(std::string* problem);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  std::string broadcast(const std::string& text);  // rank 0's, at most 4095 bytes
  std::unique_ptr<Communicator> make_world(double timeout_seconds);
  void finish();
  void abort(int exit_code);

 private:
  MpiModule() = default;
  const MpiModuleTable* table_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
};

}  // namespace tessera
