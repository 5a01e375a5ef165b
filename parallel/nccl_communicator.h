// Communicators over NCCL: ranks with one GPU each, as processes (on one node or many) or as threads of
// one process.
//
// Work is enqueued and the calls return at once, except split and barrier. Waits for a stream or an event
// of a context that holds such a group end with an error when the group was aborted, when NCCL reports one,
// or when they last longer than the time limit while a collective is under way.
//
// Sums: NCCL fixes their order for a given group, size and configuration, so the same run gives the same
// bits; the order is not that of the ranks, and for more than two ranks a bf16 sum is rounded at every hop.
// A maximum of floating-point numbers is gathered and taken here, because NCCL's loses NaN.
// NCCL compares nothing between ranks: different operations or sizes hang until the time limit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace tessera {

// Whether this build has NCCL.
bool has_nccl();

// A fresh id of a group, made by one rank and handed to the others by other means (ControlPlane::broadcast):
// a short string of any bytes. kUser in a build without NCCL.
std::string make_nccl_id();

// Joins the group of `id` as `rank` of `size`, with GPU `device`. Blocks until all ranks have come, at most
// `timeout_seconds` but no less than two minutes (kTransient); later waits have the limit as it is. A group of one needs no id.
// kUser in a build without NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device,
                                                     double timeout_seconds = 600,
                                                     const std::string& name = "world");

// Communicators for threads of this process, entry r for the thread of rank r, which has GPU devices[r];
// no GPU twice. An abort in one rank ends all of them. kUser in a build without NCCL.
std::vector<std::unique_ptr<Communicator>> make_nccl_thread_communicators(const std::vector<int>& devices,
                                                                          double timeout_seconds = 600);

}  // namespace tessera
