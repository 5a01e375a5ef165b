// The program that the launch tests start: this test binary itself, as one disabled test that runs
// ranks as $TESSERA_TEST_LAUNCH says ("mode world_size case") and ends with their exit code. Ranks
// that it starts as processes come by here again.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "parallel/launch.h"
#include "parallel/mesh.h"
#include "parallel/gpu_window.h"
#include "tests/parallel/communicator_conformance.h"
#include "tests/parallel/window_harness.h"

namespace tessera::test {
namespace {

struct Program {
  RankContext& rank;
  std::unique_ptr<BackendContext> context = make_context(Device{});
  std::unique_ptr<Stream> stream = context->make_stream("comm");

  void all_reduce() {
    float values[3000] = {};
    rank.world->all_reduce({values, DType::kF32, {3000}, Device{}}, ReduceOp::kSum, *stream);
    stream->synchronize();
  }
  void sleep(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
  bool is_last() const { return rank.rank + 1 == rank.world_size; }
  [[noreturn]] void all_reduce_for_ever() {
    for (;;) all_reduce();
  }
};

void say(const std::string& line) {
  // One write: lines of several processes must not mix.
  const std::string whole = line + "\n";
  [[maybe_unused]] const ssize_t put = write(STDOUT_FILENO, whole.data(), whole.size());
}

const std::map<std::string, std::function<int(Program&)>>& programs() {
  static const std::map<std::string, std::function<int(Program&)>> all = {
      {"ok",
       [](Program& p) {
         float sum = static_cast<float>(p.rank.rank + 1);
         p.rank.world->all_reduce({&sum, DType::kF32, {1}, Device{}}, ReduceOp::kSum, *p.stream);
         p.stream->synchronize();
         say(fmt::format("sum {} on rank {} of {}, local {}", sum, p.rank.rank, p.rank.world_size,
                         p.rank.local_rank));
         return 0;
       }},
      {"returns_75",
       [](Program& p) {
         p.all_reduce();
         return 75;
       }},
      {"throws_user",
       [](Program& p) -> int {
         p.all_reduce();
         if (p.is_last()) throw Error(ErrorKind::kUser, "row 7 is bad");
         p.all_reduce_for_ever();
       }},
      {"throws_standard",
       [](Program& p) -> int {
         if (p.is_last()) throw std::out_of_range("index 9 of 3");
         p.all_reduce_for_ever();
       }},
      {"all_throw",
       [](Program&) -> int { throw Error(ErrorKind::kUser, "the layout does not fit"); }},
      {"throws_below_a_mesh",
       [](Program& p) -> int {
         const int size = p.rank.world_size;
         const ProcessMesh mesh(std::move(p.rank.world), MeshShape{1, 1, 1, size});
         if (p.is_last()) throw Error(ErrorKind::kTransient, "the disk is full");
         float values[3000] = {};
         for (;;) {
           mesh.tensor().all_reduce({values, DType::kF32, {3000}, Device{}}, ReduceOp::kSum,
                                    *p.stream);
         }
       }},
      {"throws_late",
       [](Program& p) -> int {
         // The others are done already and wait for the end of the job.
         if (p.is_last()) {
           p.sleep(0.3);
           throw Error(ErrorKind::kTransient, "the disk is full");
         }
         return 0;
       }},
      {"exits",
       [](Program& p) -> int {
         p.all_reduce();
         if (p.is_last()) _exit(7);
         p.all_reduce_for_ever();
       }},
      {"exits_with_0",
       [](Program& p) -> int {
         p.all_reduce();
         if (p.is_last()) _exit(0);
         p.all_reduce_for_ever();
       }},
      {"killed",
       [](Program& p) -> int {
         p.all_reduce();
         if (p.is_last()) kill(getpid(), SIGKILL);
         p.all_reduce_for_ever();
       }},
      {"crashes",
       [](Program& p) -> int {
         p.all_reduce();
         signal(SIGABRT, SIG_DFL);
         if (p.is_last()) abort();
         p.all_reduce_for_ever();
       }},
      // A rank that does not come to a collective: the timeout names it, the deadline ends it.
      {"sleeps",
       [](Program& p) -> int {
         if (p.is_last()) p.sleep(1000);
         p.all_reduce_for_ever();
       }},
      {"stops_when_asked",
       [](Program& p) {
         say(fmt::format("rank {} is process {}", p.rank.rank, getpid()));
         for (std::int64_t step = 0;; ++step) {
           p.all_reduce();
           if (step == 0) say("running");
           if (p.rank.rank == step % p.rank.world_size) p.sleep(0.002);
           if (const auto decision = p.rank.control.agreed_stop(step)) {
             say(fmt::format("rank {} stops at {} for {}", p.rank.rank, decision->edge,
                             decision->reason));
             return 75;
           }
         }
       }},
      {"ignores_requests",
       [](Program& p) -> int {
         say(fmt::format("rank {} is process {}", p.rank.rank, getpid()));
         say("running");
         p.sleep(1000);
         return 0;
       }},
  };
  return all;
}

// A case of windows on GPUs, of which ranks share the first where there are too few.
void run_gpu_window(RankContext& rank, const std::string& name) {
  const auto context =
      make_context(Device{DeviceKind::kCuda, rank.local_rank % cuda_device_count()});
  GpuWindowOptions options;
  options.name = "world";
  options.rank = rank.rank;
  options.size = rank.world_size;
  options.timeout_seconds = name == "late" ? kShortWindowSeconds : 30;
  WindowEnv env{rank.rank, rank.world_size, *context,
                [&](const Tensor& memory, int num_flags) {
                  options.num_flags = num_flags;
                  return make_gpu_window(options, memory, *context,
                                         exchange_over(rank.control, "window", 30));
                },
                [&] { rank.control.barrier("window", 30); }};
  if (!run_window_case(name, env)) throw Error(ErrorKind::kUser, "no such case");
}

int run_program(const std::string& what) {
  std::istringstream words(what);
  std::string mode;
  std::string name;
  RunRanksOptions options;
  words >> mode >> options.world_size >> name;
  options.mode = mode == "threads"     ? LaunchMode::kThreads
                 : mode == "processes" ? LaunchMode::kProcesses
                                       : LaunchMode::kExternal;
  options.exit_grace_seconds = 2;
  options.connect_seconds = 30;
  options.collective_timeout_seconds = name == "sleeps" ? 1 : 60;
  try {
    return run_ranks(options, [&](RankContext& rank) {
      Program program{rank};
      if (const auto found = programs().find(name); found != programs().end())
        return found->second(program);
      if (const std::string prefix = "window_"; name.starts_with(prefix)) {
        run_gpu_window(rank, name.substr(prefix.size()));
        say(fmt::format("passed {} on rank {}", name, rank.rank));
        return 0;
      }
      // Cases of the conformance suite: "lasting", or one by name.
      RankEnv env{*rank.world, *program.context};
      if (name == "lasting") {
        for (const ConformanceCase& one : lasting_cases()) one.run(env);
      } else {
        find_case(name).run(env);
      }
      say(fmt::format("passed {} on rank {}", name, rank.rank));
      return 0;
    });
  } catch (const Error& error) {
    std::fprintf(stderr, "refused: %s\n", error.what());
    return exit_code(error.kind());
  }
}

}  // namespace

TEST(LaunchProgram, DISABLED_Run) {
  const char* what = std::getenv("TESSERA_TEST_LAUNCH");
  if (what == nullptr) GTEST_SKIP() << "started by the launch tests only";
  const int code = run_program(what);
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace tessera::test
