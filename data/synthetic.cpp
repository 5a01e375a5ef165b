#include "data/synthetic.h"

#include "engine/core/error.h"
#include "engine/core/philox.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "synthetic:";

class SyntheticStore : public TokenStore {
 public:
  SyntheticStore(const SyntheticSpec& spec, std::int64_t vocab_size)
      : spec_(spec),
        vocab_size_(static_cast<std::uint64_t>(vocab_size)),
        lengths_(derive_key(0, RandomPurpose::kSynthetic, 0)),
        tokens_(derive_key(0, RandomPurpose::kSynthetic, 1)) {
    CHECK_USER(vocab_size > 0,
               "[data] synthetic data needs a model or tokenizer for its vocabulary");
    counts_.rows_read = counts_.documents = spec.rows;
    counts_.tokens = spec.rows * ((spec.min_length + spec.max_length) / 2);  // about
    files_ = {{"synthetic", 0}};
  }

  std::int64_t num_documents() const override { return spec_.rows; }
  DocumentEntry document(std::int64_t index) const override {
    DocumentEntry entry;
    entry.row = static_cast<std::uint64_t>(index);
    // Documents have room for the longest: no sums over those before.
    entry.begin = static_cast<std::uint64_t>(index) * static_cast<std::uint64_t>(spec_.max_length);
    const auto choices = static_cast<std::uint64_t>(spec_.max_length - spec_.min_length + 1);
    entry.length = static_cast<std::uint64_t>(spec_.min_length) +
                   (choices > 1 ? philox_bits(lengths_, entry.row) % choices : 0);
    return entry;
  }
  void read(std::uint64_t begin, std::int64_t count, std::int32_t* out) const override {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t bits = philox_bits(tokens_, begin + static_cast<std::uint64_t>(i));
      out[i] = static_cast<std::int32_t>((bits * vocab_size_) >> 32);
    }
  }
  bool label_is_trained(std::uint64_t) const override { return true; }
  const StoreCounts& counts() const override { return counts_; }
  const std::vector<StoreFile>& files() const override { return files_; }

 private:
  SyntheticSpec spec_;
  std::uint64_t vocab_size_;
  PhiloxKey lengths_;
  PhiloxKey tokens_;
  StoreCounts counts_;
  std::vector<StoreFile> files_;
};

}  // namespace

bool is_synthetic(const std::string& path) { return path.starts_with(kPrefix); }

SyntheticSpec parse_synthetic(const std::string& path) {
  SyntheticSpec spec;
  std::string rest = path;
  if (is_synthetic(path)) rest = path.substr(kPrefix.size());
  const std::size_t times = rest.find('x');
  if (times != std::string::npos) {
    const std::string lengths = rest.substr(times + 1);
    const std::size_t dash = lengths.find('-');
    spec.rows = parse_integer(rest.substr(0, times)).value_or(0);
    spec.min_length = parse_integer(lengths.substr(0, dash)).value_or(0);
    spec.max_length = dash == std::string::npos
                          ? spec.min_length
                          : parse_integer(lengths.substr(dash + 1)).value_or(0);
  }
  CHECK_USER(spec.rows > 0 && spec.min_length >= 2 && spec.max_length >= spec.min_length &&
                 spec.max_length <= (std::int64_t{1} << 31) && spec.rows <= (std::int64_t{1} << 40),
             "[data] {} is no description of synthetic data, expected synthetic:ROWSxLENGTH or "
             "synthetic:ROWSxMIN-MAX with lengths of at least 2 tokens",
             path);
  return spec;
}

std::unique_ptr<TokenStore> make_synthetic_store(const SyntheticSpec& spec,
                                                 std::int64_t vocab_size) {
  return std::make_unique<SyntheticStore>(spec, vocab_size);
}

}  // namespace tessera
