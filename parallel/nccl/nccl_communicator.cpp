#if defined(TESSERA_WITH_NCCL)

#include "parallel/nccl_communicator.h"

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <set>
#include <utility>

#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "parallel/collective_checks.h"
#include "parallel/cuda/reduce_parts.h"
#include "parallel/gpu_window.h"
#include "parallel/nccl/lone_rank.h"
#include "parallel/nccl/nccl_group.h"

namespace tessera {
namespace nccl {
namespace {

ncclDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ncclFloat64;
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kI64:
      return ncclInt64;
    case DType::kI32:
      return ncclInt32;
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[nccl] cannot reduce {}", name_of(dtype));
  }
}

const char* at(const void* data, std::size_t bytes) { return static_cast<const char*>(data) + bytes; }
char* at(void* data, std::size_t bytes) { return static_cast<char*>(data) + bytes; }

// Piece p of `in` goes to rank p, and the piece from rank p comes to `out` + p * bytes.
ncclResult_t exchange_pieces(const void* in, std::size_t in_step, void* out, std::size_t bytes, int size,
                             ncclComm_t comm, cudaStream_t stream) {
  ncclResult_t result = ncclGroupStart();
  for (int p = 0; p < size && result == ncclSuccess; ++p) {
    const auto index = static_cast<std::size_t>(p);
    result = ncclSend(at(in, index * in_step), bytes, ncclUint8, p, comm, stream);
    if (result == ncclSuccess) result = ncclRecv(at(out, index * bytes), bytes, ncclUint8, p, comm, stream);
  }
  const ncclResult_t end = ncclGroupEnd();
  return result == ncclSuccess ? end : result;
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclGroup> group)
      : Communicator(group->rank(), group->size(), group->name()), group_(std::move(group)) {}

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;

  void all_reduce(const Tensor& tensor, ReduceOp op, Stream& stream) override {
    check_all_reduce(*this, tensor, stream);
    const HostOp call = describe(HostOpKind::kAllReduce, tensor, op, -1, tensor.numel());
    if (loses_nan(tensor.dtype, op)) {
      return collective(call, stream, [&](ncclComm_t comm, cudaStream_t s) {
        const std::size_t element = size_of(tensor.dtype);
        return in_chunks(tensor.numel(), element, [&](std::int64_t begin, std::int64_t count) {
          void* own = at(tensor.data, static_cast<std::size_t>(begin) * element);
          const std::size_t bytes = static_cast<std::size_t>(count) * element;
          const ncclResult_t result = ncclAllGather(own, group_->staging(), bytes, ncclUint8, comm, s);
          if (result == ncclSuccess) reduce_staged(call, bytes, own, count, stream);
          return result;
        });
      });
    }
    collective(call, stream, [&](ncclComm_t comm, cudaStream_t s) {
      return ncclAllReduce(tensor.data, tensor.data, static_cast<std::size_t>(tensor.numel()),
                           data_type(tensor.dtype), reduction(op), comm, s);
    });
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_gather(*this, in, out, stream);
    collective(describe(HostOpKind::kAllGather, in, ReduceOp::kSum, -1, in.numel()), stream,
               [&](ncclComm_t comm, cudaStream_t s) {
                 return ncclAllGather(in.data, out.data, in.bytes(), ncclUint8, comm, s);
               });
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, Stream& stream) override {
    check_reduce_scatter(*this, in, out, stream);
    const HostOp call = describe(HostOpKind::kReduceScatter, in, op, -1, out.numel());
    if (loses_nan(in.dtype, op)) {
      return collective(call, stream, [&](ncclComm_t comm, cudaStream_t s) {
        const std::size_t element = size_of(in.dtype);
        return in_chunks(out.numel(), element, [&](std::int64_t begin, std::int64_t count) {
          const std::size_t skip = static_cast<std::size_t>(begin) * element;
          const std::size_t bytes = static_cast<std::size_t>(count) * element;
          const ncclResult_t result =
              exchange_pieces(at(std::as_const(in).data, skip), out.bytes(), group_->staging(), bytes, size(), comm, s);
          if (result == ncclSuccess) reduce_staged(call, bytes, at(out.data, skip), count, stream);
          return result;
        });
      });
    }
    collective(call, stream, [&](ncclComm_t comm, cudaStream_t s) {
      return ncclReduceScatter(in.data, out.data, static_cast<std::size_t>(out.numel()), data_type(in.dtype),
                               reduction(op), comm, s);
    });
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_to_all(*this, in, out, stream);
    const HostOp call = describe(HostOpKind::kAllToAll, in, ReduceOp::kSum, -1, in.numel() / size());
    collective(call, stream, [&](ncclComm_t comm, cudaStream_t s) {
      return exchange_pieces(in.data, call.bytes(), out.data, call.bytes(), size(), comm, s);
    });
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_broadcast(*this, tensor, root, stream);
    collective(describe(HostOpKind::kBroadcast, tensor, ReduceOp::kSum, root, tensor.numel()), stream,
               [&](ncclComm_t comm, cudaStream_t s) {
                 return ncclBroadcast(tensor.data, tensor.data, tensor.bytes(), ncclUint8, root, comm, s);
               });
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "send", tensor, peer, stream);
    add_message(HostOpKind::kSend, tensor, peer, stream);
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "recv", tensor, peer, stream);
    add_message(HostOpKind::kRecv, tensor, peer, stream);
  }
  void barrier() override {
    HostOp call;
    call.kind = HostOpKind::kBarrier;
    call.sequence = ++sequence_;
    group_->run(call, group_->own_stream(), [&](ncclComm_t comm, cudaStream_t s) {
      return ncclAllReduce(group_->staging(), group_->staging(), 1, ncclUint8, ncclMax, comm, s);
    });
    group_->wait_last();
  }
  std::unique_ptr<PeerWindow> make_window(const Tensor& memory, int num_flags,
                                          BackendContext& context) override {
    CHECK(!in_group_, "[{} make_window] a group scope holds only sends and receives", name());
    GpuWindowOptions options;
    options.name = name();
    options.rank = rank();
    options.size = size();
    options.num_flags = num_flags;
    options.timeout_seconds = group_->timeout_seconds();
    options.tree = group_->tree();
    return make_gpu_window(options, memory, context, [this](const std::string& own) { return exchange(own); });
  }
  // Holds the tree alone: it must not keep NCCL's resources.
  std::function<void(const std::string&)> abort_handle() override {
    return [tree = group_->tree()](const std::string& reason) { tree->abort(reason); };
  }

 protected:
  void group_start() override {
    CHECK(!in_group_, "[{}] a group scope is already open", name());
    in_group_ = true;
  }
  void group_end(bool is_launched) override {
    in_group_ = false;
    const auto messages = std::exchange(messages_, {});
    if (is_launched && !messages.empty()) run_messages(messages, *stream_);
  }

 private:
  static HostOp describe(HostOpKind kind, const Tensor& tensor, ReduceOp reduce, int peer, std::int64_t count) {
    HostOp op;
    op.kind = kind;
    op.reduce = reduce;
    op.dtype = tensor.dtype;
    op.peer = peer;
    op.in = tensor.data;
    op.out = tensor.data;
    op.count = count;
    return op;
  }
  static ncclRedOp_t reduction(ReduceOp op) { return op == ReduceOp::kMax ? ncclMax : ncclSum; }
  static bool loses_nan(DType dtype, ReduceOp op) { return op == ReduceOp::kMax && is_floating(dtype); }

  // Calls body(begin, count) for runs of elements of which every rank's fit the staging memory together.
  template <typename Body>
  ncclResult_t in_chunks(std::int64_t count, std::size_t element, Body&& body) const {
    const auto chunk =
        static_cast<std::int64_t>(NcclGroup::kStagingBytes / (element * static_cast<std::size_t>(size())));
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      const ncclResult_t result = body(begin, std::min(chunk, count - begin));
      if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
  }
  // out = the reduction of every rank's `bytes` in the staging memory.
  void reduce_staged(const HostOp& call, std::size_t bytes, void* out, std::int64_t count, Stream& stream) const {
    std::vector<const void*> inputs;
    for (int r = 0; r < size(); ++r) inputs.push_back(at(group_->staging(), static_cast<std::size_t>(r) * bytes));
    // More ranks than one kernel takes: the result so far is the first input of the next.
    std::size_t done = 0;
    while (done < inputs.size()) {
      std::vector<const void*> part;
      if (done > 0) part.push_back(out);
      const std::size_t room = static_cast<std::size_t>(cuda::kMaxReducedParts) - part.size();
      const std::size_t end = std::min(inputs.size(), done + room);
      part.insert(part.end(), inputs.begin() + static_cast<long>(done), inputs.begin() + static_cast<long>(end));
      cuda::reduce_parts(call.dtype, call.reduce, part, std::vector<void*>{out}, count, stream);
      done = end;
    }
  }

  // Everybody's blob, in order of ranks. Blocks.
  std::vector<std::string> exchange(const std::string& own) {
    constexpr std::size_t kRoom = 1024;
    struct Blob {
      std::uint32_t bytes;
      char data[kRoom - sizeof(std::uint32_t)];
    };
    CHECK(own.size() <= sizeof(Blob::data) && sizeof(Blob) * static_cast<std::size_t>(size()) <= NcclGroup::kStagingBytes,
          "[{} exchange] {} bytes of each of {} ranks", name(), own.size(), size());
    std::vector<Blob> blobs(static_cast<std::size_t>(size()));
    Blob& mine = blobs[static_cast<std::size_t>(rank())];
    mine.bytes = static_cast<std::uint32_t>(own.size());
    std::memcpy(mine.data, own.data(), own.size());
    HostOp call;
    call.kind = HostOpKind::kWindow;
    call.sequence = ++sequence_;
    char* staging = static_cast<char*>(group_->staging());
    char* place = staging + static_cast<std::size_t>(rank()) * sizeof(Blob);
    group_->run(call, group_->own_stream(), [&](ncclComm_t comm, cudaStream_t s) {
      CUDA_CHECK(cudaMemcpyAsync(place, &mine, sizeof(Blob), cudaMemcpyHostToDevice, s));
      return ncclAllGather(place, staging, sizeof(Blob), ncclUint8, comm, s);
    });
    group_->wait_last();
    CUDA_CHECK(cudaMemcpyAsync(blobs.data(), staging, blobs.size() * sizeof(Blob), cudaMemcpyDeviceToHost,
                               group_->own_stream()));
    CUDA_CHECK(cudaStreamSynchronize(group_->own_stream()));
    std::vector<std::string> result;
    for (const Blob& blob : blobs) result.emplace_back(blob.data, blob.bytes);
    return result;
  }

  void watch(Stream& stream) {
    cuda::CudaContext& context = cuda::as_cuda(stream.context());
    if (watching_ == &context) return;
    CHECK(context.device().index == group_->device(), "[{}] rank {} uses cuda:{}, the stream is on {}", name(), rank(),
          group_->device(), to_string(context.device()));
    context.add_watch(group_);
    watching_ = &context;
  }
  void collective(HostOp call, Stream& stream, const NcclGroup::Enqueue& enqueue) {
    CHECK(!in_group_, "[{} {}] a group scope holds only sends and receives", name(), name_of(call.kind));
    call.sequence = ++sequence_;
    watch(stream);
    group_->run(call, cuda::native(stream), [&](ncclComm_t comm, cudaStream_t s) {
      return call.count == 0 ? ncclSuccess : enqueue(comm, s);
    });
  }
  void add_message(HostOpKind kind, const Tensor& tensor, int peer, Stream& stream) {
    const HostOp call = describe(kind, tensor, ReduceOp::kSum, peer, tensor.numel());
    if (!in_group_) {
      CHECK(peer != rank(), "[{} {}] a rank can reach itself only inside a group scope", name(), name_of(kind));
      run_messages({call}, stream);
      return;
    }
    CHECK(messages_.empty() || stream_ == &stream,
          "[{} {}] the operations of one group scope must share a stream", name(), name_of(kind));
    stream_ = &stream;
    messages_.push_back(call);
  }
  void run_messages(const std::vector<HostOp>& messages, Stream& stream) {
    watch(stream);
    group_->run(messages.front(), cuda::native(stream), [&](ncclComm_t comm, cudaStream_t s) {
      ncclResult_t result = ncclGroupStart();
      for (const HostOp& one : messages) {
        if (result != ncclSuccess) break;
        if (one.count == 0) continue;
        result = one.kind == HostOpKind::kSend ? ncclSend(one.in, one.bytes(), ncclUint8, one.peer, comm, s)
                                               : ncclRecv(one.out, one.bytes(), ncclUint8, one.peer, comm, s);
      }
      const ncclResult_t end = ncclGroupEnd();
      return result == ncclSuccess ? end : result;
    });
  }

  std::shared_ptr<NcclGroup> group_;
  cuda::CudaContext* watching_ = nullptr;  // the context whose waits look at the group
  std::uint64_t sequence_ = 0;
  bool in_group_ = false;
  Stream* stream_ = nullptr;  // of the open group
  std::vector<HostOp> messages_;
};

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key, const std::string& name) {
  CHECK(!in_group_, "[{} split] a group scope holds only sends and receives", this->name());
  HostOp call;
  call.kind = HostOpKind::kSplit;
  call.sequence = ++sequence_;
  // Every rank learns all colors, so that groups of one need no communicator of NCCL's.
  const auto ranks = static_cast<std::size_t>(size());
  CHECK(ranks * sizeof(int) <= NcclGroup::kStagingBytes, "[{} split] {} ranks", this->name(), size());
  std::vector<int> colors(ranks);
  group_->run(call, group_->own_stream(), [&](ncclComm_t comm, cudaStream_t s) {
    int* staging = static_cast<int*>(group_->staging());
    CUDA_CHECK(cudaMemcpyAsync(staging + rank(), &color, sizeof color, cudaMemcpyHostToDevice, s));
    return ncclAllGather(staging + rank(), staging, sizeof color, ncclUint8, comm, s);
  });
  group_->wait_last();
  CUDA_CHECK(cudaMemcpyAsync(colors.data(), group_->staging(), ranks * sizeof(int), cudaMemcpyDeviceToHost,
                             group_->own_stream()));
  CUDA_CHECK(cudaStreamSynchronize(group_->own_stream()));

  const auto count_of = [&](int one) { return std::count(colors.begin(), colors.end(), one); };
  const bool is_alone = color < 0 || count_of(color) == 1;
  const bool is_needed =
      std::any_of(colors.begin(), colors.end(), [&](int one) { return one >= 0 && count_of(one) > 1; });
  ncclComm_t child = nullptr;
  if (is_needed) {
    group_->run_now(call, [&](ncclComm_t comm) {
      return ncclCommSplit(comm, is_alone ? NCCL_SPLIT_NOCOLOR : color, key, &child, nullptr);
    });
  }
  if (color < 0) return nullptr;
  if (is_alone) return std::make_unique<LoneRank>(name, group_->tree());
  int new_rank = 0;
  int new_size = 0;
  CHECK(ncclCommUserRank(child, &new_rank) == ncclSuccess && ncclCommCount(child, &new_size) == ncclSuccess,
        "[{} split] NCCL does not know rank and size of {}", this->name(), name);
  const auto group = std::make_shared<NcclGroup>(child, group_->device(), new_rank, new_size, name, group_->tree(),
                                                 group_->timeout_seconds());
  group_->tree()->add(group);
  return std::make_unique<NcclCommunicator>(group);
}

// NCCL's own start takes seconds, whatever the limit of later waits.
constexpr double kLeastInitSeconds = 120;

// Runs `init` in a thread of its own: NCCL waits for missing ranks without end and cannot be interrupted
// before it has a communicator. After the time limit that thread is left behind; the process is to end.
void init_within(double timeout_seconds, const std::string& who, const std::function<ncclResult_t()>& init) {
  timeout_seconds = std::max(timeout_seconds, kLeastInitSeconds);
  const auto task = std::make_shared<std::packaged_task<ncclResult_t()>>(init);
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(std::chrono::duration<double>(timeout_seconds)) != std::future_status::ready) {
    TESSERA_FAIL(ErrorKind::kTransient, "[{}] not all ranks joined the NCCL group within {:g} s", who, timeout_seconds);
  }
  const ncclResult_t status = result.get();
  if (status != ncclSuccess) {
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[{}] NCCL could not form the group: {}: {}; NCCL_DEBUG=INFO says more", who,
                 ncclGetErrorString(status), ncclGetLastError(nullptr));
  }
}

}  // namespace
}  // namespace nccl

bool has_nccl() { return true; }

std::string make_nccl_id() {
  ncclUniqueId id;
  const ncclResult_t status = ncclGetUniqueId(&id);
  if (status != ncclSuccess) {
    TESSERA_FAIL(ErrorKind::kTransient, "[nccl] no id for a group: {}: {}; NCCL_DEBUG=INFO says more",
                 ncclGetErrorString(status), ncclGetLastError(nullptr));
  }
  return std::string(id.internal, sizeof id.internal);
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device,
                                                     double timeout_seconds, const std::string& name) {
  CHECK(size >= 1 && rank >= 0 && rank < size, "[{}] rank {} of {}", name, rank, size);
  const auto tree = std::make_shared<board::AbortTree>();
  if (size == 1) return std::make_unique<nccl::LoneRank>(name, tree);
  ncclUniqueId unique;
  CHECK(id.size() == sizeof unique.internal, "[{}] an NCCL id has {} bytes, this one {}", name,
        sizeof unique.internal, id.size());
  std::memcpy(unique.internal, id.data(), id.size());
  const auto comm = std::make_shared<ncclComm_t>(nullptr);
  nccl::init_within(timeout_seconds, name, [=] {
    if (cudaSetDevice(device) != cudaSuccess) return ncclUnhandledCudaError;
    return ncclCommInitRank(comm.get(), size, unique, rank);
  });
  const auto group = std::make_shared<nccl::NcclGroup>(*comm, device, rank, size, name, tree, timeout_seconds);
  tree->add(group);
  return std::make_unique<nccl::NcclCommunicator>(group);
}

std::vector<std::unique_ptr<Communicator>> make_nccl_thread_communicators(const std::vector<int>& devices,
                                                                          double timeout_seconds) {
  CHECK_USER(std::set<int>(devices.begin(), devices.end()).size() == devices.size() && !devices.empty(),
             "[nccl] {} thread ranks need a GPU each, and one is named twice; use the one-gpu ranks to share one",
             devices.size());
  const auto tree = std::make_shared<board::AbortTree>();
  const int size = static_cast<int>(devices.size());
  std::vector<std::unique_ptr<Communicator>> result;
  if (size == 1) {
    result.push_back(std::make_unique<nccl::LoneRank>("world", tree));
    return result;
  }
  const auto comms = std::make_shared<std::vector<ncclComm_t>>(devices.size());
  nccl::init_within(timeout_seconds, "world",
                    [=] { return ncclCommInitAll(comms->data(), size, devices.data()); });
  for (int rank = 0; rank < size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const auto group = std::make_shared<nccl::NcclGroup>((*comms)[index], devices[index], rank, size, "world", tree,
                                                         timeout_seconds);
    tree->add(group);
    result.push_back(std::make_unique<nccl::NcclCommunicator>(group));
  }
  return result;
}

}  // namespace tessera

#endif
