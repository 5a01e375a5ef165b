#include "parallel/launch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core/log.h"
#include "parallel/control/server.h"
#include "parallel/control/wire.h"
#include "parallel/launch_environment.h"
#include "parallel/mpi_loader.h"
#include "parallel/processes/process_communicator.h"
#include "parallel/rank_runner.h"
#include "parallel/stop_signals.h"

namespace tessera {
namespace {

using WorldMaker = std::function<std::unique_ptr<Communicator>(const WorldSeed&)>;

// The second Ctrl-C ends the process at once; whatever must not be lost is on disk behind a rename.
[[noreturn]] void end_at_once() {
  fmt::print(stderr, "ended by the second Ctrl-C\n");
  std::fflush(nullptr);
  ::_exit(130);
}

int run_threads(const RunRanksOptions& options, const std::function<int(RankContext&)>& body) {
  const int size = options.world_size;
  auto planes = make_local_control_planes(size);
  std::vector<std::unique_ptr<Communicator>> groups;
  WorldMaker make_world = options.make_world;
  if (!make_world) {
    if (size == 1) {
      groups.push_back(make_self_communicator("world"));
    } else {
      groups = make_thread_communicators(size, options.collective_timeout_seconds);
    }
    make_world = [&](const WorldSeed& seed) {
      return std::move(groups[static_cast<std::size_t>(seed.rank)]);
    };
  }

  std::unique_ptr<StopSignals> signals;
  if (options.handles_signals) {
    signals = std::make_unique<StopSignals>([&](int signal, int count) {
      if (signal == SIGINT && count > 1) end_at_once();
      if (count == 1) {
        log::info("{} received: stopping at the next step edge{}", signal_name(signal),
                  signal == SIGINT ? "; press Ctrl-C again to end at once" : "");
      }
      planes[0]->request_stop(fmt::format("{}", signal_name(signal)));
    });
  }

  std::once_flag told;
  const auto tell = [&] {
    const auto failure = planes[0]->first_failure();
    if (failure) std::call_once(told, [&] { launch::tell_failure(options, *failure); });
  };
  launch::ExitDeadline deadline(options.exit_grace_seconds, [&] {
    tell();
    fmt::print(stderr,
               "error: some ranks did not end within {:g} s of it; the process ends without them\n",
               options.exit_grace_seconds);
  });
  std::vector<int> codes(static_cast<std::size_t>(size));
  const auto run = [&](int rank) {
    ControlPlane& control = *planes[static_cast<std::size_t>(rank)];
    const WorldSeed seed{rank, size, rank, control};
    codes[static_cast<std::size_t>(rank)] = launch::run_rank(options, seed, make_world, body);
    if (const auto failure = control.first_failure()) deadline.arm(exit_code(failure->kind));
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      log::set_thread_rank(rank);
      run(rank);
    });
  }
  // Rank 0 runs here: a body of one rank needs no thread, and debuggers find it.
  run(0);
  for (std::thread& thread : threads) thread.join();
  const auto failure = planes[0]->first_failure();
  tell();
  return failure ? exit_code(failure->kind) : *std::max_element(codes.begin(), codes.end());
}

// One rank in this process, started by run_ranks of a parent or by a launcher.
class ExternalRank {
 public:
  ExternalRank(const RunRanksOptions& options, LaunchEnvironment launch)
      : options_(options), launch_(std::move(launch)) {}

  int run(const std::function<int(RankContext&)>& body) {
    log::set_thread_rank(launch_.rank);
    // Ranks on GPUs need MPI only to find each other.
    if (launch_.has_mpi && (!options_.make_world || launch_.rendezvous.empty())) start_mpi();
    connect();
    std::unique_ptr<StopSignals> signals;
    if (options_.handles_signals) signals = handle_signals();
    int code = run_watched(body);
    const auto failure = control_->first_failure();
    if (failure && is_ours_to_tell(*failure)) {
      // It speaks for the job: the console is not for rank 0 alone now.
      log::set_thread_rank(-1);
      launch::tell_failure(options_, *failure);
    }
    control_->leave();
    if (server_ != nullptr) code = serve_to_the_end(code);
    if (mpi_ != nullptr && !failure) mpi_->finish();
    return code;
  }

 private:
  // Starts the deadline when a failure becomes known.
  class Watch {
   public:
    Watch(ControlPlane& control, launch::ExitDeadline& deadline)
        : thread_([this, &control, &deadline] {
            while (!is_over_) {
              if (const auto failure = control.wait_failure(0.1)) {
                deadline.arm(exit_code(failure->kind));
                return;
              }
            }
          }) {}
    ~Watch() {
      is_over_ = true;
      thread_.join();
    }

   private:
    std::atomic<bool> is_over_ = false;
    std::thread thread_;
  };

  int run_watched(const std::function<int(RankContext&)>& body) {
    launch::ExitDeadline deadline(options_.exit_grace_seconds, [&] {
      fmt::print(stderr, "error: rank {} did not end within {:g} s of the job's failure\n",
                 launch_.rank, options_.exit_grace_seconds);
      std::fflush(stderr);
      if (mpi_ != nullptr) mpi_->abort(exit_code(control_->first_failure()->kind));
    });
    // The clock starts with the failure, not with the end of the body.
    const Watch watch(*control_, deadline);
    const WorldSeed seed{launch_.rank, launch_.world_size, launch_.local_rank, *control_};
    return launch::run_rank(options_, seed, world_maker(), body);
  }

  void start_mpi() {
    mpi_ = MpiModule::load(&mpi_problem_);
    if (mpi_ == nullptr) return;
    CHECK_USER(
        mpi_->size() == launch_.world_size && mpi_->rank() == launch_.rank,
        "[launch] {} promises {} ranks, but the MPI library of this program sees a world of {}: "
        "mpirun and the library are of different MPI installations. Use the mpirun that belongs to "
        "the library, or srun --mpi=pmix",
        launch_.source, launch_.world_size, mpi_->size());
  }

  void connect() {
    ControlOptions options;
    options.token = launch_.token;
    options.connect_seconds = options_.connect_seconds;
    if (launch_.is_own_child) {
      control_ =
          connect_control_plane(launch_.rendezvous, launch_.rank, launch_.world_size, options);
      return;
    }
    std::string address = launch_.rendezvous;
    if (address.empty()) {
      CHECK_USER(
          mpi_ != nullptr,
          "[launch] {} started rank {} of {}, but the ranks cannot find each other: the MPI module "
          "is missing ({}). Install it, or give every rank TESSERA_RENDEZVOUS=host:port of rank 0",
          launch_.source, launch_.rank, launch_.world_size, mpi_problem_);
      if (launch_.rank == 0) {
        server_ = std::make_unique<ControlServer>("*:0", launch_.world_size, options);
        address = server_->address();
      }
      address = mpi_->broadcast(address);
    } else if (launch_.rank == 0) {
      server_ = std::make_unique<ControlServer>(listening(address), launch_.world_size, options);
    }
    // Rank 0 need not be able to look up its own name.
    if (server_ != nullptr) address = local(server_->address());
    control_ = connect_control_plane(address, launch_.rank, launch_.world_size, options);
  }

  // Rank 0 listens on every interface: the name that the others use may not be the one it sees.
  static std::string listening(const std::string& address) {
    if (control::is_unix_address(address)) return address;
    return "*" + address.substr(std::min(address.rfind(':'), address.size()));
  }

  static std::string local(const std::string& address) {
    if (control::is_unix_address(address)) return address;
    return "127.0.0.1" + address.substr(address.rfind(':'));
  }

  std::unique_ptr<StopSignals> handle_signals() {
    return std::make_unique<StopSignals>([this](int signal, int count) {
      // A parent of ours counts the Ctrl-C itself.
      if (signal == SIGINT && count > 1 && !launch_.is_own_child) end_at_once();
      control_->request_stop(fmt::format("{} to rank {}", signal_name(signal), launch_.rank));
    });
  }

  WorldMaker world_maker() {
    if (options_.make_world) return options_.make_world;
    if (mpi_ != nullptr) {
      return [this](const WorldSeed&) {
        return mpi_->make_world(options_.collective_timeout_seconds);
      };
    }
    return [this](const WorldSeed& seed) {
      seed.control.barrier("start of the job", options_.connect_seconds);
      return make_process_communicator(seed.control, options_.collective_timeout_seconds);
    };
  }

  // Once per job: a parent tells it; otherwise the rank whose error it is, and for the loss of a
  // rank the first that is still there.
  bool is_ours_to_tell(const FailureReport& failure) const {
    if (launch_.is_own_child) return false;
    if (!failure.is_loss) return failure.rank == launch_.rank;
    const int teller = failure.rank == 0 || failure.rank == -1 ? 1 : 0;
    return launch_.rank == teller || launch_.world_size == 1;
  }

  // The others may need the server longer than this rank does.
  int serve_to_the_end(int code) {
    while (!server_->wait_all_left(0.2)) {
      if (!server_->first_failure()) continue;
      server_->wait_all_left(options_.exit_grace_seconds);
      break;
    }
    const auto failure = server_->first_failure();
    return failure ? exit_code(failure->kind) : code;
  }

  const RunRanksOptions& options_;
  const LaunchEnvironment launch_;
  std::string mpi_problem_;
  std::unique_ptr<MpiModule> mpi_;
  std::unique_ptr<ControlServer> server_;  // in rank 0, unless a parent holds it
  std::unique_ptr<ControlPlane> control_;
};

}  // namespace

int run_ranks(const RunRanksOptions& options, const std::function<int(RankContext&)>& body) {
  CHECK_USER(options.world_size >= 1, "[launch] {} ranks; at least 1 is needed",
             options.world_size);
  if (const auto launch = detect_launch()) {
    CHECK_USER(
        launch->world_size == options.world_size,
        "[launch] {} started {} ranks, but the configuration asks for {}. Start as many, or change "
        "run.ranks and the layout",
        launch->source, launch->world_size, options.world_size);
    return ExternalRank(options, *launch).run(body);
  }
  CHECK_USER(options.mode != LaunchMode::kExternal || options.world_size == 1,
             "[launch] {} ranks were to be started by a launcher, but none is at work: use mpirun "
             "or srun, "
             "or set TESSERA_RANK, TESSERA_WORLD_SIZE and TESSERA_RENDEZVOUS",
             options.world_size);
  if (options.mode == LaunchMode::kProcesses && options.world_size > 1)
    return launch::run_processes(options);
  return run_threads(options, body);
}

int launched_world_size() {
  const auto launch = detect_launch();
  return launch ? launch->world_size : 0;
}

bool runs_rank_zero() {
  const auto launch = detect_launch();
  return !launch || launch->rank == 0;
}

}  // namespace tessera
