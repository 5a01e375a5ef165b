// The control plane of ranks that are threads of one process.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "parallel/communicator.h"
#include "parallel/control/control_plane.h"

namespace tessera {
namespace {

// What the ranks share.
struct LocalState {
  explicit LocalState(int world_size)
      : callbacks(static_cast<std::size_t>(world_size)),
        passed(static_cast<std::size_t>(world_size), -1) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> values;
  std::optional<FailureReport> failure;
  // Callbacks run under their own mutex, so that removing one waits for it.
  std::mutex callback_mutex;
  std::vector<std::function<void(const FailureReport&)>> callbacks;
  std::vector<std::int64_t> passed;  // last edge that each rank went past
  std::optional<StopDecision> decision;
};

std::chrono::duration<double> seconds(double value) { return std::chrono::duration<double>(value); }

class LocalControlPlane final : public ControlPlane {
 public:
  LocalControlPlane(int rank, int world_size, std::shared_ptr<LocalState> state)
      : ControlPlane(rank, world_size), state_(std::move(state)) {}
  ~LocalControlPlane() override { on_abort({}); }

  void set(const std::string& key, const std::string& value) override {
    {
      const std::lock_guard lock(state_->mutex);
      state_->values[key] = value;
    }
    state_->changed.notify_all();
  }
  std::string get(const std::string& key, double timeout_seconds) override {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, seconds(timeout_seconds), [&] {
      return state_->failure.has_value() || state_->values.contains(key);
    });
    const auto found = state_->values.find(key);
    if (found != state_->values.end()) return found->second;
    if (state_->failure)
      throw AbortedError(fmt::format("[control] ended: {}", state_->failure->text));
    TESSERA_FAIL(ErrorKind::kTransient, "[control] rank {} waited {:g} s for {}", rank(),
                 timeout_seconds, key);
  }
  std::optional<std::string> peek(const std::string& key) override {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->values.find(key);
    if (found == state_->values.end()) return std::nullopt;
    return found->second;
  }

  void report_error(ErrorKind kind, const std::string& text) noexcept override {
    const FailureReport report{rank(), kind, text};
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->failure) return;
      state_->failure = report;
    }
    state_->changed.notify_all();
    const std::lock_guard lock(state_->callback_mutex);
    for (std::size_t r = 0; r < state_->callbacks.size(); ++r) {
      auto callback = std::exchange(state_->callbacks[r], {});
      if (callback && static_cast<int>(r) != rank()) callback(report);
    }
  }
  std::optional<FailureReport> first_failure() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->failure;
  }
  std::optional<FailureReport> wait_failure(double timeout_seconds) const override {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, seconds(timeout_seconds),
                             [&] { return state_->failure.has_value(); });
    return state_->failure;
  }
  void on_abort(std::function<void(const FailureReport&)> callback) override {
    const std::lock_guard lock(state_->callback_mutex);
    const auto failure = first_failure();
    if (failure && callback) {
      if (failure->rank != rank()) callback(*failure);
      callback = {};
    }
    state_->callbacks[static_cast<std::size_t>(rank())] = std::move(callback);
  }

  void request_stop(const std::string& reason) override {
    const std::lock_guard lock(state_->mutex);
    if (state_->decision) return;
    state_->decision =
        StopDecision{*std::max_element(state_->passed.begin(), state_->passed.end()) + 1, reason};
  }
  std::optional<StopDecision> agreed_stop(std::int64_t edge) override {
    const std::lock_guard lock(state_->mutex);
    if (state_->decision && edge >= state_->decision->edge) return state_->decision;
    std::int64_t& passed = state_->passed[static_cast<std::size_t>(rank())];
    passed = std::max(passed, edge);
    return std::nullopt;
  }
  void leave() noexcept override {}

 private:
  std::shared_ptr<LocalState> state_;  // shared by all ranks
};

}  // namespace

std::vector<std::unique_ptr<ControlPlane>> make_local_control_planes(int world_size) {
  CHECK(world_size >= 1, "[control] a world of {} ranks", world_size);
  const auto state = std::make_shared<LocalState>(world_size);
  std::vector<std::unique_ptr<ControlPlane>> result;
  for (int rank = 0; rank < world_size; ++rank) {
    result.push_back(std::make_unique<LocalControlPlane>(rank, world_size, state));
  }
  return result;
}

}  // namespace tessera
