#include "models/moment_image.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

#include "engine/core/error.h"
#include "engine/device/stream.h"

namespace tessera {
namespace {

constexpr std::int64_t kBlocksPerThread = 4096;
constexpr std::int64_t kMostThreads = 8;

// body(begin, end) over parts of [0, count), on as many threads as pay.
void for_ranges(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t parts =
      std::clamp<std::int64_t>(count / kBlocksPerThread, 1, std::min(cores, kMostThreads));
  std::vector<std::thread> threads;
  for (std::int64_t part = 1; part < parts; ++part) {
    threads.emplace_back([&, part] { body(count * part / parts, count * (part + 1) / parts); });
  }
  body(0, count / parts);
  for (std::thread& thread : threads) thread.join();
}

struct Codes {
  std::vector<std::uint8_t> values;
  std::vector<float> scales;
};

void copy_from(const Tensor& tensor, void* to, Stream& stream) {
  stream.copy_bytes(to, tensor.data, tensor.bytes());
}
void copy_to(const void* from, const Tensor& tensor, Stream& stream) {
  stream.copy_bytes(tensor.data, from, tensor.bytes());
}

template <typename Decode>
void decode_blocks(const Codes& codes, Decode&& decode, bf16* out) {
  float table[256];
  for (int code = 0; code < 256; ++code) table[code] = decode(static_cast<std::uint8_t>(code));
  for_ranges(static_cast<std::int64_t>(codes.scales.size()),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t i = begin * kMomentBlock; i < end * kMomentBlock; ++i) {
                 out[i] = bf16(table[codes.values[static_cast<std::size_t>(i)]] *
                               codes.scales[static_cast<std::size_t>(i / kMomentBlock)]);
               }
             });
}

template <typename Encode>
void encode_blocks(const bf16* in, Encode&& encode, Codes& codes) {
  for_ranges(static_cast<std::int64_t>(codes.scales.size()),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t block = begin; block < end; ++block) {
                 const bf16* values = in + block * kMomentBlock;
                 float largest = 0;
                 for (std::int64_t i = 0; i < kMomentBlock; ++i) {
                   largest = std::max(largest, std::abs(static_cast<float>(values[i])));
                 }
                 const float scale = moment_scale(largest);
                 const float factor = inverse_moment_scale(scale);
                 codes.scales[static_cast<std::size_t>(block)] = scale;
                 for (std::int64_t i = 0; i < kMomentBlock; ++i) {
                   codes.values[static_cast<std::size_t>(block * kMomentBlock + i)] =
                       encode(static_cast<float>(values[i]) * factor, kMomentNearest);
                 }
               }
             });
}

}  // namespace

MomentImage::MomentImage(const ParamStore& params) : params_(&params) {
  CHECK(params.options().trains && params.options().moments == DType::kU8,
        "[moment_image] the moments are {}, expected codes", name_of(params.options().moments));
  std::int64_t size = 0;
  for (int b = 0; b < params.num_shards(); ++b) {
    begins_.push_back(size);
    size += params.layout(b).shard_size;
  }
  m_.resize(static_cast<std::size_t>(size));
  v_.resize(static_cast<std::size_t>(size));
}

Tensor MomentImage::view(const std::vector<bf16>& values, int b) const {
  const std::int64_t begin = begins_.at(static_cast<std::size_t>(b));
  // A Tensor is a view that writers get, too.
  return Tensor(const_cast<bf16*>(values.data()) + begin, DType::kBF16,
                Shape{params_->layout(b).shard_size}, Device{});
}

void MomentImage::read_shards(Stream& stream) {
  version_ = params_->weight_version(0);
  Codes m;
  Codes v;
  for (int b = 0; b < params_->num_shards(); ++b) {
    const ParamStore::Shard& shard = params_->shard(b);
    for (const auto& [codes, values, scales] :
         {std::tuple{&m, &shard.m, &shard.m_scale}, {&v, &shard.v, &shard.v_scale}}) {
      codes->values.resize(static_cast<std::size_t>(values->numel()));
      codes->scales.resize(static_cast<std::size_t>(scales->numel()));
      copy_from(*values, codes->values.data(), stream);
      copy_from(*scales, codes->scales.data(), stream);
    }
    stream.synchronize();
    decode_blocks(m, decode_m, this->m(b).as<bf16>());
    decode_blocks(v, decode_v, this->v(b).as<bf16>());
  }
}

void MomentImage::write_shards(Stream& stream) {
  if (params_->weight_version(0) != version_) return;
  Codes m;
  Codes v;
  for (int b = 0; b < params_->num_shards(); ++b) {
    const ParamStore::Shard& shard = params_->shard(b);
    for (Codes* codes : {&m, &v}) {
      codes->values.resize(static_cast<std::size_t>(shard.m.numel()));
      codes->scales.resize(static_cast<std::size_t>(shard.m_scale.numel()));
    }
    encode_blocks(this->m(b).as<bf16>(), encode_m, m);
    encode_blocks(this->v(b).as<bf16>(), encode_v, v);
    copy_to(m.values.data(), shard.m, stream);
    copy_to(m.scales.data(), shard.m_scale, stream);
    copy_to(v.values.data(), shard.v, stream);
    copy_to(v.scales.data(), shard.v_scale, stream);
    stream.synchronize();
  }
}

}  // namespace tessera
