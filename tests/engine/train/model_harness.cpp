#include "tests/engine/train/model_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "data/batch.h"
#include "engine/train/optimizer.h"
#include "kernels/step_control.h"
#include "models/weights.h"
#include "parallel/context_split.h"
#include "parallel/one_gpu_communicator.h"

namespace tessera::test {

void run_thread_ranks(int size, Device device,
                      const std::function<void(int, std::unique_ptr<Communicator>)>& body) {
  auto communicators = device.kind == DeviceKind::kCuda
                           ? make_one_gpu_communicators(size, device.index, 120)
                           : make_thread_communicators(size, 120);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto communicator = std::move(communicators[static_cast<std::size_t>(rank)]);
      // Outlives the body's groups, which an exception destroys on its way out.
      const auto group = communicator->split(0, rank, "harness");
      try {
        body(rank, std::move(communicator));
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (!first) {
          first = std::current_exception();
          group->abort(error.what());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

std::int64_t HostBatch::target_tokens() const {
  return std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
}

HostBatch HostBatch::from_documents(const std::vector<std::vector<std::int32_t>>& documents) {
  HostBatch batch;
  batch.documents.push_back(0);
  for (const auto& ids : documents) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      batch.tokens.push_back(ids[i]);
      batch.targets.push_back(i + 1 < ids.size() ? ids[i + 1] : kIgnoredTarget);
      batch.positions.push_back(static_cast<std::int32_t>(i));
    }
    batch.documents.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  }
  return batch;
}

namespace {

// What `rank` of a context-parallel group holds of a value for each token.
std::vector<std::int32_t> own_part(const std::vector<std::int32_t>& values,
                                   const ContextSplit& split, int rank) {
  std::vector<std::int32_t> own(static_cast<std::size_t>(split.tokens()));
  split.for_each_piece(rank, [&](std::int64_t place, std::int64_t at, std::int64_t count) {
    std::copy_n(values.begin() + place, count, own.begin() + at);
  });
  return own;
}

}  // namespace

void upload(const HostBatch& batch, ModelRuntime& runtime) {
  upload(batch, runtime, runtime.batch());
}

void upload(const HostBatch& batch, ModelRuntime& runtime, const DeviceBatch& device) {
  const ContextSplit split(device.tokens.numel(), runtime.mesh().context().size());
  const int rank = runtime.mesh().context().rank();
  const auto tokens = static_cast<std::size_t>(split.all_tokens());
  CHECK(batch.tokens.size() <= tokens, "[harness] batch of {} tokens in a geometry of {}",
        batch.tokens.size(), tokens);
  HostBatch padded = batch;
  padded.tokens.resize(tokens, 0);
  padded.targets.resize(tokens, kIgnoredTarget);
  padded.positions.resize(tokens, 0);
  if (padded.documents.empty()) padded.documents.push_back(0);
  const auto bounds = static_cast<std::size_t>(device.documents.numel());
  padded.documents.resize(bounds, padded.documents.back());
  for (std::vector<std::int32_t>* values : {&padded.tokens, &padded.targets, &padded.positions}) {
    *values = own_part(*values, split, rank);
  }
  std::vector<std::int32_t> order;
  sort_tokens(padded.tokens, order);
  Stream& stream = runtime.compute();
  const auto copy = [&](const Tensor& to, const std::vector<std::int32_t>& from) {
    stream.copy_bytes(to.data, from.data(), to.bytes());
  };
  copy(device.tokens, padded.tokens);
  copy(device.targets, padded.targets);
  copy(device.positions, padded.positions);
  copy(device.order, order);
  copy(device.documents, padded.documents);
  std::vector<std::int32_t> piece_rows;
  for (int i = 0; device.piece_bounds.defined() && i < split.pieces(); ++i) {
    std::vector<std::int32_t> queries(bounds);
    std::vector<std::int32_t> keys(bounds);
    piece_bounds(split.piece(rank, i), padded.documents, queries, keys);
    piece_rows.insert(piece_rows.end(), queries.begin(), queries.end());
    piece_rows.insert(piece_rows.end(), keys.begin(), keys.end());
  }
  if (device.piece_bounds.defined()) copy(device.piece_bounds, piece_rows);
  stream.synchronize();
}

namespace {

// Adds this rank's owned pieces of `get(shard)` to the global tensors.
void collect(ModelRuntime& runtime, const std::function<Tensor(const ParamStore::Shard&)>& get,
             GlobalTensors& into) {
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_shards(); ++b) {
    const ParamStore::Shard& shard = params.shard(b);
    const Tensor values = get(shard);
    std::vector<char> raw(values.bytes());
    runtime.compute().copy_bytes(raw.data(), values.data, raw.size());
    runtime.compute().synchronize();
    std::vector<double> host(static_cast<std::size_t>(values.numel()));
    convert_elements(raw.data(), values.dtype, host.data(), DType::kF64, values.numel());
    for (const ShardPiece& piece : shard.pieces) {
      const auto index = static_cast<std::size_t>(piece.param);
      const ParamSpec& spec = params.bucket(b).params[index];
      auto& global = into[spec.name];
      global.resize(static_cast<std::size_t>(spec.shape.numel()));
      const std::int64_t cols = spec.shape.rank == 2 ? spec.shape[1] : 1;
      for (const GlobalExtent& e : global_extents(piece, params.layout(b).pieces[index].extent)) {
        for (std::int64_t r = 0; r < e.rows; ++r) {
          std::copy_n(host.begin() + e.shard_begin + r * e.cols, e.cols,
                      global.begin() + (e.row_begin + r) * cols + e.col_begin);
        }
      }
    }
  }
}

// The bytes of this rank's whole weights, by the piece that they are of.
std::map<std::string, std::string> whole_weights(ModelRuntime& runtime) {
  std::map<std::string, std::string> result;
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_buckets(); ++b) {
    const bool is_apart = params.gathers_codes(b);
    const Tensor exact = is_apart ? runtime.sync().gather_exact(b) : Tensor{};
    const WeightLease lease = is_apart ? WeightLease{} : runtime.sync().acquire(b);
    const auto& specs = params.bucket(b).params;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const LocalExtent& extent = params.layout(b).pieces[i].extent;
      const ParamId id{b, static_cast<int>(i)};
      const Tensor weight = is_apart ? params.weight_in(exact, id) : params.weight(id);
      std::string bytes(weight.bytes(), '\0');
      runtime.compute().copy_bytes(bytes.data(), weight.data, bytes.size());
      runtime.compute().synchronize();
      const std::string piece =
          fmt::format("{} from [{}, {}]", specs[i].name, extent.row_begin, extent.col_begin);
      result.emplace(piece, std::move(bytes));
    }
  }
  return result;
}

}  // namespace

StepResult train_step(const ModelSetup& setup, const std::vector<HostBatch>& batches,
                      const LoadWeights& load, double learning_rate, double max_grad_norm) {
  std::int64_t tokens = 0;
  std::int64_t documents = 1;
  std::int64_t longest = 1;
  for (const HostBatch& batch : batches) {
    tokens = std::max<std::int64_t>(tokens, static_cast<std::int64_t>(batch.tokens.size()));
    documents =
        std::max<std::int64_t>(documents, static_cast<std::int64_t>(batch.documents.size()) - 1);
    for (const std::int32_t p : batch.positions) longest = std::max<std::int64_t>(longest, p + 1);
  }
  RuntimeOptions options;
  options.geometry = batch_geometry(1, tokens, documents, setup.compute, setup.mesh.tensor,
                                    setup.sequence_parallel, setup.mesh.context);
  options.geometry.max_length = longest;
  options.recompute = setup.recompute;
  options.params.compute = setup.compute;
  options.params.gradients = setup.gradients;
  options.params.moments = setup.moments;
  options.params.offloads_masters = setup.offloads_masters;
  options.params.offloads_moments = setup.offloads_moments;
  options.params.offload_piece = setup.offload_piece;
  options.mlp_chunk_bytes = setup.mlp_chunk_bytes;
  options.offloads_inputs = setup.offloads_inputs;
  options.params.zero = setup.zero;
  options.params.bucket_bytes = setup.bucket_bytes;
  options.params.weight_decay = setup.weight_decay;
  options.sequence_parallel = setup.sequence_parallel;
  options.overlap = setup.overlap;
  options.peer_copies = setup.peer_copies;
  options.recipe = setup.recipe;
  options.pipeline.kind = setup.schedule;
  options.pipeline.chunks = setup.chunks;
  options.pipeline.micro_batches =
      (static_cast<int>(batches.size()) + setup.mesh.data - 1) / setup.mesh.data;

  StepResult result;
  std::mutex mutex;
  std::map<std::string, std::string> copies;
  run_thread_ranks(
      setup.mesh.size(), setup.device, [&](int rank, std::unique_ptr<Communicator> world) {
        ContextOptions context_options;
        context_options.inline_streams = setup.inline_streams;
        context_options.cpu_threads = setup.cpu_threads;
        const auto context = make_context(setup.device, context_options);
        const ProcessMesh mesh(std::move(world), setup.mesh);
        const int dp = setup.mesh.data;
        const auto step = [&](ModelRuntime& runtime, int number) {
          runtime.params().begin_step();
          runtime.compute().set_zero(runtime.totals().data, runtime.totals().bytes());
          double targets = 0;
          runtime.run_micro_batches(
              options.pipeline.micro_batches, [&](int i, const DeviceBatch& target) {
                const auto index = static_cast<std::size_t>(i * dp + mesh.data().rank());
                const HostBatch batch = index < batches.size() ? batches[index] : HostBatch{};
                upload(batch, runtime, target);
                // Ranks that share a batch count it once.
                if (mesh.context().rank() == 0)
                  targets += static_cast<double>(batch.target_tokens());
              });
          runtime.compute().copy_bytes(runtime.totals().flat_slice(1, 1).data, &targets,
                                       sizeof targets);
          runtime.compute().synchronize();
          runtime.sum_totals();
          runtime.sync().finish_gradients();
          runtime.compute().synchronize();
          if (number == 1) {
            const std::lock_guard lock(mutex);
            collect(
                runtime, [](const ParamStore::Shard& s) { return s.gradient; }, result.gradients);
          }
          StepControl control;
          control.step = number;
          control.learning_rate = static_cast<float>(learning_rate);
          control.max_grad_norm = static_cast<float>(max_grad_norm);
          runtime.compute().copy_bytes(runtime.control().data, &control, StepControl::kHostBytes);
          runtime.compute().synchronize();
          if (runtime.options().params.compute != DType::kF64)
            optimizer_step(runtime, AdamWSettings{});
          runtime.compute().synchronize();
          if (rank != 0) return;
          double totals[2];
          runtime.compute().copy_bytes(totals, runtime.totals().data, sizeof totals);
          runtime.compute().synchronize();
          result.losses.push_back(totals[0] / totals[1]);
        };
        RuntimeMemory memory;
        {
          ContextOptions meta_options;
          meta_options.planned = context->capabilities();
          const auto meta = make_context(Device{DeviceKind::kMeta, 0}, meta_options);
          const ProcessMesh meta_mesh(make_meta_communicator(rank, setup.mesh.size()), setup.mesh);
          ModelRuntime dry(*meta, meta_mesh, setup.config, options, {});
          dry.params().begin_step();
          dry.run_micro_batches(options.pipeline.micro_batches, [](int, const DeviceBatch&) {});
          dry.sum_totals();
          dry.sync().finish_gradients();
          if (setup.compute != DType::kF64) optimizer_step(dry, AdamWSettings{});
          memory = dry.memory();
        }
        ModelRuntime runtime(*context, mesh, setup.config, options, memory);
        load(runtime);
        for (int number = 1; number <= setup.steps; ++number) step(runtime, number);
        const auto own = whole_weights(runtime);  // not by turns: a gather needs all ranks
        const std::lock_guard lock(mutex);
        for (const auto& [piece, bytes] : own) {
          const auto [at, is_new] = copies.try_emplace(piece, bytes);
          if (!is_new && at->second != bytes && result.disagreement.empty())
            result.disagreement = piece;
        }
        collect(
            runtime, [](const ParamStore::Shard& s) { return s.exact(); }, result.weights);
        if (rank == 0) {
          double totals[2];
          StepControl control;
          runtime.compute().copy_bytes(totals, runtime.totals().data, sizeof totals);
          runtime.compute().copy_bytes(&control, runtime.control().data, sizeof control);
          runtime.compute().synchronize();
          result.loss_sum = totals[0];
          result.target_tokens = totals[1];
          result.grad_norm = control.grad_norm;
        }
      });
  return result;
}

GlobalTensors random_weights(const ModelConfig& config, std::uint64_t seed, double std) {
  GlobalTensors weights;
  const Transformer model(config, 1, false);
  std::uint64_t stream = 0;
  for (const BucketSpec& bucket : model.registry().buckets()) {
    for (const ParamSpec& spec : bucket.params) {
      auto& values = weights[spec.name];
      values.resize(static_cast<std::size_t>(spec.shape.numel()));
      const PhiloxKey key = derive_key(seed, RandomPurpose::kSynthetic, 0, ++stream);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = spec.init_mean + std * static_cast<double>(philox_normal(key, i));
      }
    }
  }
  return weights;
}

void set_weights(ModelRuntime& runtime, const GlobalTensors& weights) {
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_shards(); ++b) {
    const ParamStore::Shard& shard = params.shard(b);
    for (const ShardPiece& piece : shard.pieces) {
      const auto index = static_cast<std::size_t>(piece.param);
      const ParamSpec& spec = params.bucket(b).params[index];
      const auto& global = weights.at(spec.name);
      const std::int64_t cols = spec.shape.rank == 2 ? spec.shape[1] : 1;
      for (const GlobalExtent& e : global_extents(piece, params.layout(b).pieces[index].extent)) {
        std::vector<double> values;
        for (std::int64_t r = 0; r < e.rows; ++r) {
          const auto begin = global.begin() + (e.row_begin + r) * cols + e.col_begin;
          values.insert(values.end(), begin, begin + e.cols);
        }
        const Tensor target = shard.exact().flat_slice(e.shard_begin, e.elements());
        std::vector<char> converted(target.bytes());
        convert_elements(values.data(), DType::kF64, converted.data(), target.dtype, e.elements());
        runtime.compute().copy_bytes(target.data, converted.data(), target.bytes());
        runtime.compute().synchronize();
      }
    }
  }
  refresh_weights(runtime);
}

ModelConfig uneven_config(int layers, int kv_heads, bool is_tied) {
  ModelConfig config;
  config.vocab_size = 37;
  config.hidden_size = 20;
  config.intermediate_size = 28;
  config.num_hidden_layers = layers;
  config.num_attention_heads = 4;
  config.num_key_value_heads = kv_heads;
  config.head_dim = 6;
  config.rms_norm_eps = 1e-5;
  config.max_position_embeddings = 64;
  config.qk_norm = is_tied;
  config.attention_qkv_bias = !is_tied;
  config.tie_word_embeddings = is_tied;
  return config;
}

std::vector<HostBatch> random_batches(int count, std::uint64_t seed,
                                      const std::function<std::vector<int>(int)>& lengths) {
  const PhiloxKey key = derive_key(seed, RandomPurpose::kSynthetic, 1);
  std::vector<HostBatch> result;
  std::uint64_t at = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<std::vector<std::int32_t>> documents;
    for (const int length : lengths(i)) {
      std::vector<std::int32_t>& ids = documents.emplace_back();
      for (int k = 0; k < length; ++k) {
        ids.push_back(static_cast<std::int32_t>(philox_bits(key, at++) % 37));
      }
    }
    result.push_back(HostBatch::from_documents(documents));
  }
  return result;
}

void expect_same_training(const StepResult& got, const StepResult& wanted, double loss_tolerance) {
  EXPECT_EQ(got.disagreement, "");
  EXPECT_EQ(got.target_tokens, wanted.target_tokens);
  ASSERT_EQ(got.losses.size(), 5u);
  EXPECT_LT(wanted.losses[4], wanted.losses[0]);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(got.losses[i], wanted.losses[i], loss_tolerance * wanted.losses[i])
        << "step " << i + 1;
  }
  EXPECT_NEAR(got.grad_norm, wanted.grad_norm, 1e-4 * wanted.grad_norm);
  ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
  for (const auto& [name, gradient] : wanted.gradients) {
    const auto& own = got.gradients.at(name);
    ASSERT_EQ(own.size(), gradient.size()) << name;
    const double scale = norm_of(gradient);
    for (std::size_t i = 0; i < own.size(); ++i) {
      ASSERT_NEAR(own[i], gradient[i], 1e-5 * scale) << name << " element " << i;
    }
  }
}

double norm_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}

}  // namespace tessera::test
