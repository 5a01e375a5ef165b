// ControlServer: the meeting point of a job's ranks (see control_plane.h), a thread with a poll
// loop. It runs in the launcher, or in rank 0 when something else launched the ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "parallel/control/control_plane.h"

namespace tessera {

class ControlServer {
 public:
  // Listens on `address` (port 0: any; kUser if it cannot be used) for ranks 0 .. world_size - 1.
  ControlServer(const std::string& address, int world_size, const ControlOptions& options);
  // Ends at once; ranks still connected see their control plane lost.
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;

  // Where the ranks connect to.
  const std::string& address() const;

  // As if `rank` had reported it; for a launcher that saw the process end. Pass -1 for the
  // launcher's own troubles.
  void report_error(int rank, ErrorKind kind, const std::string& text);
  void request_stop(const std::string& reason);

  std::optional<FailureReport> first_failure() const;
  // Whether the rank has said goodbye.
  bool has_left(int rank) const;
  // Waits until every rank has left or was lost, at most `timeout_seconds`; returns whether they
  // have.
  bool wait_all_left(double timeout_seconds) const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace tessera
