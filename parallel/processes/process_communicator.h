// Groups whose ranks are processes of one machine: boards in files that all of them map. The files
// are in memory where /dev/shm has room, else in the folder for temporary files, and have no name
// any more once all ranks hold them, so nothing is left behind however the ranks end.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/control/control_plane.h"

namespace tessera {

// Makes the board of a world of `size` ranks and returns its path; kTransient when no folder has
// the room for it. Whoever made it removes it with remove_process_board once every rank has joined.
std::string make_process_board(int size);
void remove_process_board(const std::string& path) noexcept;

// Joins the world at `path` as `rank`. A peer whose process ends while this one waits for it ends
// the wait within a second or so; see make_thread_communicators for the rest.
std::unique_ptr<Communicator> join_process_board(const std::string& path, int rank, int size,
                                                 double timeout_seconds = 600);

// The world of a job whose ranks are all on this machine; kUser, naming both machines, if they are
// not. Collective over the control plane's ranks.
std::unique_ptr<Communicator> make_process_communicator(ControlPlane& control,
                                                        double timeout_seconds = 600);

}  // namespace tessera
