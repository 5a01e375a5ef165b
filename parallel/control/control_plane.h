// ControlPlane: how the ranks of a job talk beside the collectives — rendezvous, small blobs, the
// first error, an agreed stop. It keeps working while collectives hang, so it is what ends them: a
// rank's error, or the loss of a rank, reaches all others within seconds and runs their abort
// callbacks.
//
// The server is a thread of the launcher or of rank 0; ranks that are threads of one process share
// their state directly (make_local_control_planes). All methods may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/error.h"

namespace tessera {

struct FailureReport {
  int rank = -1;  // whose error it is; -1: the control plane's own
  ErrorKind kind = ErrorKind::kTransient;
  std::string text;
  bool is_loss = false;  // the rank did not report it itself: it is gone
};

struct StopDecision {
  std::int64_t edge = 0;
  std::string reason;
};

class ControlPlane {
 public:
  virtual ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Key/value store of the job. Values are small (up to some MiB) and any bytes.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until some rank has set the key. kTransient after `timeout_seconds`; AbortedError as
  // soon as a failure is known.
  virtual std::string get(const std::string& key, double timeout_seconds) = 0;
  // The value, or nothing if no rank has set the key yet.
  virtual std::optional<std::string> peek(const std::string& key) = 0;
  // Blocks until every rank has called it with this name as often as this rank; the error after
  // `timeout_seconds` names the missing ranks.
  void barrier(const std::string& name, double timeout_seconds);
  // Returns the blob of `root` on every rank; calls match by name and count like a barrier's.
  std::string broadcast(const std::string& name, const std::string& blob, int root,
                        double timeout_seconds);

  // Tells every rank that this one failed. The first report of the job is the one that counts.
  virtual void report_error(ErrorKind kind, const std::string& text) noexcept = 0;
  virtual std::optional<FailureReport> first_failure() const = 0;
  // Waits up to `timeout_seconds` for a failure to be known.
  virtual std::optional<FailureReport> wait_failure(double timeout_seconds) const = 0;
  // `callback` runs once, when a failure of another rank or of the control plane becomes known (at
  // once if it is already), in a thread of the control plane; it must not block. An empty function
  // removes it and returns once it is not running.
  virtual void on_abort(std::function<void(const FailureReport&)> callback) = 0;

  // Asks all ranks to stop at the next edge they can agree on; the first reason counts.
  virtual void request_stop(const std::string& reason) = 0;
  // Called by every rank at each edge (step, or finer) with growing numbers. Returns the decision
  // when the job is to stop here: the same edge on every rank, one that no rank had passed when the
  // stop was requested. Costs a mutex; waits for an answer only once a stop has been requested.
  virtual std::optional<StopDecision> agreed_stop(std::int64_t edge) = 0;

  // The orderly end: from here on the loss of this rank is not a failure. Bounded in time.
  virtual void leave() noexcept = 0;

 protected:
  ControlPlane(int rank, int world_size);

 private:
  std::string next_round(const std::string& name);

  int rank_;
  int world_size_;
  struct Rounds;
  std::unique_ptr<Rounds> rounds_;
};

// Entry r for rank r; all share one state.
std::vector<std::unique_ptr<ControlPlane>> make_local_control_planes(int world_size);

struct ControlOptions {
  std::string token;                // ranks of another job are turned away
  double connect_seconds = 300;     // for the server and all ranks to appear
  double beat_seconds = 1;          // between heartbeats
  double silence_seconds = 20;      // without a heartbeat a peer of another machine counts as lost
  double loss_grace_seconds = 0.5;  // for a better explanation than "the connection closed"
};

// Connects to the server at `address` ("host:port", "unix:/path" or "unix:@name" for the abstract
// namespace), trying until options.connect_seconds. kTransient if that fails, kUser with the
// server's words if it refuses this rank.
std::unique_ptr<ControlPlane> connect_control_plane(const std::string& address, int rank,
                                                    int world_size, const ControlOptions& options);

}  // namespace tessera
