#include "parallel/control/server.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/control/wire.h"

namespace tessera {

using control::Message;
using control::MessageKind;

class ControlServer::Loop {
 public:
  Loop(const std::string& address, int world_size, const ControlOptions& options)
      : options_(options),
        listener_(control::listen_on(address, &address_)),
        members_(static_cast<std::size_t>(world_size)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Loop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.wake();
    thread_.join();
  }

  const std::string& address() const { return address_; }

  void fail(const FailureReport& report) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = report;
    broadcast(failure_message());
    changed_.notify_all();
    wake_.wake();
  }

  void request_stop(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (is_stop_requested_) return;
    is_stop_requested_ = true;
    stop_reason_ = reason;
    broadcast({MessageKind::kFreeze});
    decide_stop();
    wake_.wake();
  }

  std::optional<FailureReport> first_failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  bool has_left(int rank) const {
    const std::lock_guard lock(mutex_);
    return members_[static_cast<std::size_t>(rank)].has_said_goodbye;
  }

  bool wait_all_left(double timeout_seconds) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [&] {
      return std::all_of(members_.begin(), members_.end(),
                         [](const Member& member) { return member.state == MemberState::kGone; });
    });
  }

 private:
  enum class MemberState { kExpected, kHere, kGone };
  struct Member {
    MemberState state = MemberState::kExpected;
    std::string who;
    bool has_said_goodbye = false;
    double lost_at = 0;  // when the connection broke without a goodbye; 0: it did not
    std::optional<std::int64_t> passed;
  };
  struct Connection {
    control::Socket socket;
    std::string in;
    std::string out;
    int rank = -1;  // before its hello
    double last_heard = 0;
    bool is_closing = false;  // once `out` is sent
  };
  struct Waiter {
    Connection* connection;
    std::int64_t request;
  };

  void run() {
    double next_beat = control::monotonic_seconds() + options_.beat_seconds;
    double last_round = control::monotonic_seconds();
    for (;;) {
      std::vector<pollfd> fds = {{listener_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        for (const Connection& connection : connections_) {
          const short events = connection.out.empty() ? POLLIN : POLLIN | POLLOUT;
          fds.push_back({connection.socket.fd(), events, 0});
        }
      }
      const double pause = std::clamp(next_beat - control::monotonic_seconds(), 0.0,
                                      std::max(0.01, options_.loss_grace_seconds / 2));
      ::poll(fds.data(), fds.size(), static_cast<int>(pause * 1000) + 1);
      wake_.drain();

      const std::lock_guard lock(mutex_);
      const double now = control::monotonic_seconds();
      // If this thread itself was stopped for a while (Ctrl-Z, a suspended machine), silence is no
      // evidence against the ranks.
      const double stall = now - last_round;
      last_round = now;
      if (stall > 3 * options_.beat_seconds) {
        for (Connection& connection : connections_) connection.last_heard += stall;
      }
      while (true) {
        control::Socket socket = control::accept_from(listener_);
        if (!socket.is_open()) break;
        Connection& connection = connections_.emplace_back();
        connection.socket = std::move(socket);
        connection.last_heard = now;
      }
      for (auto it = connections_.begin(); it != connections_.end();) {
        it = serve(*it, now) ? std::next(it) : drop(it, now);
      }
      if (now >= next_beat) {
        broadcast({MessageKind::kBeat});
        next_beat = now + options_.beat_seconds;
      }
      judge_losses(now);
    }
  }

  // False when the connection is over.
  bool serve(Connection& connection, double now) {
    const std::size_t before = connection.in.size();
    const bool is_open = control::receive_available(connection.socket, connection.in);
    if (connection.in.size() != before) connection.last_heard = now;
    bool is_bad = false;
    while (auto message = control::decode(connection.in, &is_bad)) {
      if (!handle(connection, *message)) return false;
    }
    if (!is_open || is_bad) return false;
    if (!control::send_available(connection.socket, connection.out)) return false;
    if (connection.is_closing && connection.out.empty()) return false;
    // On one machine the kernel closes the socket of a dead process; a silent one is only stopped,
    // by a debugger perhaps.
    if (!control::is_unix_address(address_) &&
        now - connection.last_heard > options_.silence_seconds) {
      if (connection.rank >= 0) {
        set_failure(
            {connection.rank, ErrorKind::kTransient,
             fmt::format("[control] rank {} ({}) has sent no heartbeat for {:g} s; its machine or "
                         "the network is gone, or the process is stopped",
                         connection.rank, member_of(connection).who, options_.silence_seconds),
             true});
      }
      return false;
    }
    return true;
  }

  // False to close the connection at once.
  bool handle(Connection& connection, const Message& message) {
    if (connection.rank < 0)
      return message.kind == MessageKind::kHello && admit(connection, message);
    switch (message.kind) {
      case MessageKind::kSet: {
        values_[message.key] = message.value;
        const auto waiting = waiters_.find(message.key);
        if (waiting == waiters_.end()) return true;
        for (const Waiter& waiter : waiting->second) {
          send(*waiter.connection, {MessageKind::kValue, waiter.request, 0, {}, message.value});
        }
        waiters_.erase(waiting);
        return true;
      }
      case MessageKind::kGet: {
        const auto found = values_.find(message.key);
        if (found != values_.end()) {
          send(connection, {MessageKind::kValue, message.number, 0, {}, found->second});
        } else if (message.number2 == 1) {
          send(connection, {MessageKind::kValue, message.number, 1});
        } else {
          waiters_[message.key].push_back({&connection, message.number});
        }
        return true;
      }
      case MessageKind::kReport:
        set_failure({connection.rank, static_cast<ErrorKind>(message.number), message.value});
        return true;
      case MessageKind::kStop:
        if (!is_stop_requested_) {
          is_stop_requested_ = true;
          stop_reason_ = message.value;
          broadcast({MessageKind::kFreeze});
        }
        return true;
      case MessageKind::kPassed:
        member_of(connection).passed = message.number;
        decide_stop();
        return true;
      case MessageKind::kBye:
        member_of(connection).state = MemberState::kGone;
        member_of(connection).has_said_goodbye = true;
        decide_stop();
        changed_.notify_all();
        connection.is_closing = true;
        return true;
      default:
        return true;
    }
  }

  bool admit(Connection& connection, const Message& hello) {
    const auto refuse = [&](const std::string& why) {
      send(connection, {MessageKind::kRefuse, 0, 0, {}, why});
      connection.is_closing = true;
      return true;
    };
    const auto world = static_cast<std::int64_t>(members_.size());
    if (hello.value != options_.token) {
      return refuse(
          fmt::format("[control] {} belongs to another job than this server at {}; choose "
                      "another port",
                      hello.key, address_));
    }
    if (hello.number2 != world) {
      return refuse(
          fmt::format("[control] {} says the job has {} ranks, the server at {} counts {}; "
                      "start every rank with the same world size",
                      hello.key, hello.number2, address_, world));
    }
    if (hello.number < 0 || hello.number >= world) {
      return refuse(
          fmt::format("[control] {} says it is rank {} of {}", hello.key, hello.number, world));
    }
    Member& member = members_[static_cast<std::size_t>(hello.number)];
    if (member.state != MemberState::kExpected) {
      return refuse(
          fmt::format("[control] {} says it is rank {}, which {} already is; give every "
                      "process its own rank",
                      hello.key, hello.number, member.who));
    }
    member.state = MemberState::kHere;
    member.who = hello.key;
    connection.rank = static_cast<int>(hello.number);
    send(connection, {MessageKind::kWelcome});
    if (failure_) send(connection, failure_message());
    if (is_stop_requested_) {
      send(connection, {MessageKind::kFreeze});
      if (decision_) send(connection, stop_message());
    }
    return true;
  }

  std::list<Connection>::iterator drop(std::list<Connection>::iterator it, double now) {
    if (it->rank >= 0) {
      Member& member = member_of(*it);
      if (member.state == MemberState::kHere && member.lost_at == 0) member.lost_at = now;
    }
    for (auto& [key, list] : waiters_) {
      std::erase_if(list, [&](const Waiter& waiter) { return waiter.connection == &*it; });
    }
    return connections_.erase(it);
  }

  // A connection that broke without a goodbye is a lost rank, unless something explains it better
  // soon.
  void judge_losses(double now) {
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      Member& member = members_[rank];
      if (member.state != MemberState::kHere || member.lost_at == 0) continue;
      if (!failure_ && now - member.lost_at < options_.loss_grace_seconds) continue;
      member.state = MemberState::kGone;
      set_failure(
          {static_cast<int>(rank), ErrorKind::kTransient,
           fmt::format("[control] rank {} ({}) was lost: its connection closed without a goodbye",
                       rank, member.who),
           true});
      decide_stop();
      changed_.notify_all();
    }
  }

  void set_failure(const FailureReport& report) {
    if (failure_) return;
    failure_ = report;
    broadcast(failure_message());
    changed_.notify_all();
  }

  // Once every rank that is still there has said how far it went, the next edge is free for all.
  void decide_stop() {
    if (!is_stop_requested_ || decision_) return;
    std::int64_t furthest = -1;
    for (const Member& member : members_) {
      if (member.state == MemberState::kGone) continue;
      if (!member.passed) return;
      furthest = std::max(furthest, *member.passed);
    }
    decision_ = StopDecision{furthest + 1, stop_reason_};
    broadcast(stop_message());
  }

  Message failure_message() const {
    return {MessageKind::kFailure, failure_->rank, static_cast<std::int64_t>(failure_->kind),
            failure_->is_loss ? "lost" : "", failure_->text};
  }
  Message stop_message() const {
    return {MessageKind::kStopAt, decision_->edge, 0, {}, decision_->reason};
  }
  void send(Connection& connection, const Message& message) {
    connection.out += control::encode(message);
    // Mostly it fits the socket at once; what is left goes out with the next round.
    control::send_available(connection.socket, connection.out);
  }
  void broadcast(const Message& message) {
    for (Connection& connection : connections_) {
      if (connection.rank >= 0 && !connection.is_closing) send(connection, message);
    }
  }
  Member& member_of(const Connection& connection) {
    return members_[static_cast<std::size_t>(connection.rank)];
  }

  const ControlOptions options_;
  std::string address_;
  control::Socket listener_;
  control::WakePipe wake_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool stopping_ = false;
  std::list<Connection> connections_;
  std::vector<Member> members_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::vector<Waiter>> waiters_;
  std::optional<FailureReport> failure_;
  bool is_stop_requested_ = false;
  std::string stop_reason_;
  std::optional<StopDecision> decision_;
  std::thread thread_;
};

ControlServer::ControlServer(const std::string& address, int world_size,
                             const ControlOptions& options)
    : loop_(std::make_unique<Loop>(address, world_size, options)) {}
ControlServer::~ControlServer() = default;

const std::string& ControlServer::address() const { return loop_->address(); }
void ControlServer::report_error(int rank, ErrorKind kind, const std::string& text) {
  loop_->fail({rank, kind, text, true});
}
void ControlServer::request_stop(const std::string& reason) { loop_->request_stop(reason); }
std::optional<FailureReport> ControlServer::first_failure() const { return loop_->first_failure(); }
bool ControlServer::has_left(int rank) const { return loop_->has_left(rank); }
bool ControlServer::wait_all_left(double timeout_seconds) const {
  return loop_->wait_all_left(timeout_seconds);
}

}  // namespace tessera
