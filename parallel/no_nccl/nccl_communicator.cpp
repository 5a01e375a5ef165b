// Part of every build; empty where NCCL is there.
#if !defined(TESSERA_WITH_NCCL)

#include "parallel/nccl_communicator.h"

namespace tessera {
namespace {

[[noreturn]] void fail_without_nccl() {
  TESSERA_FAIL(ErrorKind::kUser,
               "[nccl] this build has no NCCL; build where nccl.h and libnccl are found, use one GPU, or use "
               "run.device: cpu");
}

}  // namespace

bool has_nccl() { return false; }
std::string make_nccl_id() { fail_without_nccl(); }
std::unique_ptr<Communicator> make_nccl_communicator(const std::string&, int, int, int, double,
                                                     const std::string&) {
  fail_without_nccl();
}
std::vector<std::unique_ptr<Communicator>> make_nccl_thread_communicators(const std::vector<int>&, double) {
  fail_without_nccl();
}

}  // namespace tessera

#endif
