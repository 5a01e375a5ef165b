#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "tools/commands/command.h"

namespace tessera {

Device choose_device(const std::string& name, int local_rank) {
  const int gpus = name == "cpu" ? 0 : cuda_device_count();
  if (gpus == 0) {
    CHECK_USER(name != "cuda", "[device] run.device is cuda, but no CUDA device can be used here; "
               "`nvidia-smi` shows what the driver sees. Use run.device: cpu");
    return Device{};
  }
  return Device{DeviceKind::kCuda, local_rank % gpus};
}

std::unique_ptr<BackendContext> make_rank_context(Device device, int local_ranks, bool tunes_gemm) {
  ContextOptions options;
  options.autotune_gemm = tunes_gemm;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  options.cpu_threads = std::max(1, cores / std::max(1, local_ranks));
  return make_context(device, options);
}

void run_local_ranks(int ranks, const std::string& device,
                     const std::function<void(int, std::unique_ptr<Communicator>, BackendContext&)>& body) {
  const auto run = [&](int rank, std::unique_ptr<Communicator> communicator) {
    const auto context = make_rank_context(choose_device(device, rank), ranks);
    body(rank, std::move(communicator), *context);
  };
  if (ranks == 1) {
    run(0, make_self_communicator("world"));
    return;
  }
  auto communicators = make_thread_communicators(ranks);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      log::set_thread_rank(rank);
      auto communicator = std::move(communicators[static_cast<std::size_t>(rank)]);
      // Outlives the groups that an error destroys on its way out.
      const auto guard = communicator->split(0, rank, "guard");
      try {
        run(rank, std::move(communicator));
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
        guard->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
