// The control plane of a rank that is a process: a connection to the server and a thread that keeps
// it alive while the rank computes.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "parallel/communicator.h"
#include "parallel/control/control_plane.h"
#include "parallel/control/wire.h"

namespace tessera {
namespace {

using control::Message;
using control::MessageKind;

// How long the answer to a stop request may take: every rank's control thread answers at once.
constexpr double kDecisionSeconds = 60;
constexpr double kGoodbyeSeconds = 2;
constexpr double kAnswerSeconds = 10;

std::chrono::duration<double> seconds(double value) { return std::chrono::duration<double>(value); }

class SocketControlPlane final : public ControlPlane {
 public:
  SocketControlPlane(const std::string& address, int rank, int world_size,
                     const ControlOptions& options)
      : ControlPlane(rank, world_size), address_(address), options_(options) {
    connect();
    last_heard_ = control::monotonic_seconds();
    thread_ = std::thread([this] { run(); });
    std::unique_lock lock(mutex_);
    const bool is_answered = changed_.wait_for(lock, seconds(options_.connect_seconds), [&] {
      return is_welcome_ || !refusal_.empty() || is_lost_;
    });
    if (is_answered && is_welcome_) return;
    const std::string refusal = refusal_;
    lock.unlock();
    stop_thread();
    CHECK_USER(refusal.empty(), "{}", refusal);
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[control] rank {}: {} took the connection but gave no welcome", rank, address);
  }
  ~SocketControlPlane() override { stop_thread(); }

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    send({MessageKind::kSet, 0, 0, key, value});
  }
  std::string get(const std::string& key, double timeout_seconds) override {
    std::unique_lock lock(mutex_);
    if (auto answer = ask(lock, key, false, timeout_seconds)) return std::move(answer->value);
    TESSERA_FAIL(ErrorKind::kTransient, "[control] rank {} waited {:g} s for {}", rank(),
                 timeout_seconds, key);
  }
  std::optional<std::string> peek(const std::string& key) override {
    std::unique_lock lock(mutex_);
    auto answer = ask(lock, key, true, kAnswerSeconds);
    if (!answer || answer->number2 == 1) return std::nullopt;
    return std::move(answer->value);
  }

  void report_error(ErrorKind kind, const std::string& text) noexcept override {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    // The server decides which report was the first and tells everyone, this rank included.
    send({MessageKind::kReport, static_cast<std::int64_t>(kind), 0, {}, text});
    if (is_lost_) set_failure({rank(), kind, text});
  }
  std::optional<FailureReport> first_failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  std::optional<FailureReport> wait_failure(double timeout_seconds) const override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, seconds(timeout_seconds), [&] { return failure_.has_value(); });
    return failure_;
  }
  void on_abort(std::function<void(const FailureReport&)> callback) override {
    const std::lock_guard lock(callback_mutex_);
    callback_ = std::move(callback);
    if (const auto failure = first_failure()) run_callback(*failure);
  }

  void request_stop(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    send({MessageKind::kStop, 0, 0, {}, reason});
  }
  std::optional<StopDecision> agreed_stop(std::int64_t edge) override {
    std::unique_lock lock(mutex_);
    if (is_frozen_ && !decision_ && edge > passed_) {
      const bool is_over = changed_.wait_for(lock, seconds(kDecisionSeconds), [&] {
        return decision_.has_value() || failure_.has_value();
      });
      if (failure_ && !decision_) {
        throw AbortedError(fmt::format("[control] ended: {}", failure_->text));
      }
      if (!is_over) {
        TESSERA_FAIL(ErrorKind::kTransient,
                     "[control] rank {} waited {:g} s for the ranks to agree on where to stop",
                     rank(), kDecisionSeconds);
      }
    }
    if (decision_ && edge >= decision_->edge) return decision_;
    passed_ = std::max(passed_, edge);
    return std::nullopt;
  }

  void leave() noexcept override {
    std::unique_lock lock(mutex_);
    if (is_leaving_) return;
    is_leaving_ = true;
    send({MessageKind::kBye});
    // Until the server has read everything: closing earlier could lose what is still on its way.
    changed_.wait_for(lock, seconds(kGoodbyeSeconds), [&] { return is_lost_; });
  }

 private:
  // The answer to a kGet, or nothing after `timeout_seconds`.
  std::optional<Message> ask(std::unique_lock<std::mutex>& lock, const std::string& key,
                             bool at_once, double timeout_seconds) {
    const std::int64_t request = next_request_++;
    send({MessageKind::kGet, request, at_once ? 1 : 0, key, {}});
    changed_.wait_for(lock, seconds(timeout_seconds),
                      [&] { return answers_.contains(request) || failure_.has_value(); });
    if (const auto found = answers_.find(request); found != answers_.end()) {
      Message answer = std::move(found->second);
      answers_.erase(found);
      return answer;
    }
    abandoned_.insert(request);
    if (failure_) throw AbortedError(fmt::format("[control] ended: {}", failure_->text));
    return std::nullopt;
  }

  void connect() {
    const double end = control::monotonic_seconds() + options_.connect_seconds;
    std::string problem = "no answer";
    for (double pause = 0.01;; pause = std::min(pause * 2, 0.5)) {
      socket_ = control::connect_to(address_, std::max(0.1, end - control::monotonic_seconds()),
                                    &problem);
      if (socket_.is_open()) break;
      if (control::monotonic_seconds() > end) {
        TESSERA_FAIL(
            ErrorKind::kTransient,
            "[control] rank {} found nobody at {} for {:g} s ({}). Is rank 0 running, and does its "
            "machine accept connections on that port?",
            rank(), address_, options_.connect_seconds, problem);
      }
      std::this_thread::sleep_for(seconds(pause));
    }
    out_ = control::encode({MessageKind::kHello, rank(), world_size(),
                            fmt::format("{}, process {}", control::host_name(), ::getpid()),
                            options_.token});
  }

  void run() {
    double next_beat = control::monotonic_seconds() + options_.beat_seconds;
    double last_round = control::monotonic_seconds();
    std::string in;
    for (;;) {
      pollfd fds[2] = {{socket_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
      {
        const std::lock_guard lock(mutex_);
        if (is_stopping_) return;
        if (!out_.empty()) fds[0].events |= POLLOUT;
      }
      const double pause = std::clamp(next_beat - control::monotonic_seconds(), 0.0, 1.0);
      ::poll(fds, 2, static_cast<int>(pause * 1000) + 1);
      wake_.drain();

      std::optional<FailureReport> failed;
      {
        const std::lock_guard lock(mutex_);
        const double now = control::monotonic_seconds();
        if (now - last_round > 3 * options_.beat_seconds) last_heard_ += now - last_round;
        last_round = now;
        const bool had_failure = failure_.has_value();
        if (now >= next_beat) {
          send({MessageKind::kBeat});
          next_beat = now + options_.beat_seconds;
        }
        if (!serve(in, now)) lose(now);
        if (!had_failure) failed = failure_;
        if (is_lost_ && !failed) {
          changed_.notify_all();
          return;
        }
      }
      if (failed) {
        const std::lock_guard lock(callback_mutex_);
        run_callback(*failed);
        const std::lock_guard state(mutex_);
        if (is_lost_) return;
      }
    }
  }

  bool serve(std::string& in, double now) {
    const std::size_t before = in.size();
    const bool is_open = control::receive_available(socket_, in);
    if (in.size() != before) last_heard_ = now;
    bool is_bad = false;
    while (auto message = control::decode(in, &is_bad)) handle(*message);
    if (!is_open || is_bad) return false;
    if (!control::send_available(socket_, out_)) return false;
    // On one machine the kernel closes a dead server's socket; across machines nobody else would
    // tell.
    return control::is_unix_address(address_) || now - last_heard_ <= options_.silence_seconds;
  }

  void handle(const Message& message) {
    switch (message.kind) {
      case MessageKind::kWelcome:
        is_welcome_ = true;
        break;
      case MessageKind::kRefuse:
        refusal_ = message.value;
        break;
      case MessageKind::kValue:
        if (abandoned_.erase(message.number) == 0) answers_[message.number] = message;
        break;
      case MessageKind::kFailure:
        set_failure({static_cast<int>(message.number), static_cast<ErrorKind>(message.number2),
                     message.value, message.key == "lost"});
        break;
      case MessageKind::kFreeze:
        if (!is_frozen_) send({MessageKind::kPassed, passed_});
        is_frozen_ = true;
        break;
      case MessageKind::kStopAt:
        decision_ = StopDecision{message.number, message.value};
        break;
      default:
        break;
    }
    changed_.notify_all();
  }

  // The server is gone: the end of an orderly leave, or of the job.
  void lose(double now) {
    is_lost_ = true;
    if (!is_leaving_ && is_welcome_) {
      const bool is_silent = now - last_heard_ > options_.silence_seconds;
      set_failure(
          {-1, ErrorKind::kTransient,
           fmt::format("[control] rank {} lost the control server at {} ({}): the launcher or "
                       "rank 0 has ended, or the network is down",
                       rank(), address_, is_silent ? "silent" : "connection closed"),
           true});
    }
    changed_.notify_all();
  }

  void set_failure(const FailureReport& report) {
    if (failure_) return;
    failure_ = report;
    changed_.notify_all();
  }
  void run_callback(const FailureReport& failure) {
    const auto callback = std::exchange(callback_, {});
    if (callback && failure.rank != rank()) callback(failure);
  }
  void send(const Message& message) {
    if (is_lost_) return;
    out_ += control::encode(message);
    wake_.wake();
  }
  void stop_thread() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    wake_.wake();
    if (thread_.joinable()) thread_.join();
  }

  const std::string address_;
  const ControlOptions options_;
  control::Socket socket_;
  control::WakePipe wake_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::string out_;
  double last_heard_ = 0;
  bool is_welcome_ = false;
  std::string refusal_;
  bool is_lost_ = false;
  bool is_leaving_ = false;
  bool is_stopping_ = false;
  std::int64_t next_request_ = 1;
  std::set<std::int64_t> abandoned_;  // requests whose answers nobody waits for any more
  std::map<std::int64_t, Message> answers_;
  std::optional<FailureReport> failure_;
  bool is_frozen_ = false;
  std::int64_t passed_ = -1;
  std::optional<StopDecision> decision_;
  std::mutex callback_mutex_;  // held while the callback runs; never taken under mutex_
  std::function<void(const FailureReport&)> callback_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<ControlPlane> connect_control_plane(const std::string& address, int rank,
                                                    int world_size, const ControlOptions& options) {
  return std::make_unique<SocketControlPlane>(address, rank, world_size, options);
}

}  // namespace tessera
