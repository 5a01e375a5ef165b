// Argument checks shared by every communicator backend, so that a wrong call fails alike on one
// rank, on threads, over MPI and in a dry run. All throw kInternal: a wrong collective is our bug.
#pragma once

#include "parallel/communicator.h"

namespace tessera {

void check_all_reduce(const Communicator& group, const Tensor& tensor, const Stream& stream);
void check_all_gather(const Communicator& group, const Tensor& in, const Tensor& out,
                      const Stream& stream);
void check_reduce_scatter(const Communicator& group, const Tensor& in, const Tensor& out,
                          const Stream& stream);
void check_all_to_all(const Communicator& group, const Tensor& in, const Tensor& out,
                      const Stream& stream);
void check_broadcast(const Communicator& group, const Tensor& tensor, int root,
                     const Stream& stream);
// `who` is "send" or "recv".
void check_peer(const Communicator& group, const char* who, const Tensor& tensor, int peer,
                const Stream& stream);

// Position of this rank in `members`, after checking that they are distinct ranks of `group`.
int check_subgroup(const Communicator& group, const std::vector<int>& members,
                   const std::string& name);

}  // namespace tessera
