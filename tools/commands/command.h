// The commands of the program. Each adds its options to the application and, when it was chosen, runs
// inside CLI11's parse and leaves its exit code in `code`; errors are thrown.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/context.h"
#include "parallel/communicator.h"

namespace CLI {
class App;
}

namespace tessera {

void add_train_command(CLI::App& app, int& code);
void add_doctor_command(CLI::App& app, int& code);
void add_bench_command(CLI::App& app, int& code);
void add_plan_command(CLI::App& app, int& code);
void add_eval_command(CLI::App& app, int& code);
void add_generate_command(CLI::App& app, int& code);
void add_inspect_command(CLI::App& app, int& code);
void add_export_command(CLI::App& app, int& code);
void add_init_command(CLI::App& app, int& code);
void add_verify_command(CLI::App& app, int& code);
void add_diff_command(CLI::App& app, int& code);
void add_tokenize_command(CLI::App& app, int& code);

// The device of local rank `local_rank` for run.device "auto", "cuda" or "cpu".
Device choose_device(const std::string& name, int local_rank);

// A context for one of `local_ranks` ranks on this machine: the cores are shared among them.
// `tunes_gemm`: ContextOptions::autotune_gemm.
std::unique_ptr<BackendContext> make_rank_context(Device device, int local_ranks, bool tunes_gemm = false);

// Runs body(rank, communicator, context) as `ranks` thread ranks of this process on the CPU, or on the
// GPUs. For commands that need a model but no launcher: eval, generate, export.
void run_local_ranks(int ranks, const std::string& device,
                     const std::function<void(int, std::unique_ptr<Communicator>, BackendContext&)>& body);

}  // namespace tessera
