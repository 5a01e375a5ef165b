#include "data/megatron.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr std::int64_t kHeader = 9 + 8 + 1 + 8 + 8;

enum TypeCode : std::uint8_t { kUint8 = 1, kInt32 = 4, kUint16 = 8 };

fs::path with_extension(fs::path path, const char* extension) {
  path.replace_extension(extension);
  return path;
}

class MegatronStore : public TokenStore {
 public:
  explicit MegatronStore(const fs::path& bin)
      : bin_(bin), idx_(with_extension(bin, ".idx")), name_(with_extension(bin, ".idx").string()) {
    CHECK_USER(idx_.size() >= kHeader && std::memcmp(idx_.data(), kMagic, sizeof(kMagic)) == 0,
               "[data] {} is not a Megatron index", name_);
    const auto version = at<std::uint64_t>(9);
    CHECK_USER(version == 1, "[data] {} has version {}, expected 1", name_, version);
    const auto code = at<std::uint8_t>(17);
    CHECK_USER(code == kUint8 || code == kInt32 || code == kUint16,
               "[data] {} says that ids have type {}, expected 1 (uint8), 8 (uint16) or 4 (int32)",
               name_, code);
    id_bytes_ = code == kUint8 ? 1 : code == kUint16 ? 2 : 4;
    const auto sequences = at<std::uint64_t>(18);
    const auto entries = at<std::uint64_t>(26);
    const auto size = static_cast<std::uint64_t>(idx_.size() - kHeader);
    CHECK_USER(sequences <= size / 12 && entries >= 1 && entries <= (size - sequences * 12) / 8,
               "[data] {} is too short for {} sequences and {} documents", name_, sequences,
               entries);
    sequences_ = static_cast<std::int64_t>(sequences);
    lengths_ = kHeader;
    offsets_ = lengths_ + 4 * sequences_;
    documents_ = offsets_ + 8 * sequences_;
    counts_.documents = static_cast<std::int64_t>(entries) - 1;
    counts_.rows_read = counts_.documents;
    counts_.tokens = bin_.size() / id_bytes_;
    counts_.bytes_read = bin_.size();
    files_ = {{bin.string(), 0}};
  }

  std::int64_t num_documents() const override { return counts_.documents; }

  DocumentEntry document(std::int64_t index) const override {
    const auto first = at<std::int64_t>(documents_ + 8 * index);
    const auto end = at<std::int64_t>(documents_ + 8 * (index + 1));
    CHECK_USER(first >= 0 && first <= end && end <= sequences_,
               "[data] {}: document {} has sequences {} to {} of {}", name_, index, first, end,
               sequences_);
    DocumentEntry entry;
    entry.row = static_cast<std::uint64_t>(index);
    if (first == end) return entry;
    const std::int64_t begin = offset(first);
    std::int64_t next = begin;
    for (std::int64_t sequence = first; sequence < end; ++sequence) {
      const auto length = at<std::int32_t>(lengths_ + 4 * sequence);
      CHECK_USER(length >= 0 && offset(sequence) == next,
                 "[data] {}: the sequences of document {} do not follow one another", name_, index);
      next += std::int64_t{length} * id_bytes_;
    }
    CHECK_USER(begin >= 0 && begin % id_bytes_ == 0 && next <= bin_.size(),
               "[data] {}: document {} lies at bytes {} to {} of {}", name_, index, begin, next,
               bin_.size());
    entry.begin = static_cast<std::uint64_t>(begin / id_bytes_);
    entry.length = static_cast<std::uint64_t>((next - begin) / id_bytes_);
    return entry;
  }

  void read(std::uint64_t begin, std::int64_t count, std::int32_t* out) const override {
    CHECK(count >= 0 && begin + static_cast<std::uint64_t>(count) <=
                            static_cast<std::uint64_t>(counts_.tokens),
          "[data] tokens {} + {} are past the store's {}", begin, count, counts_.tokens);
    const char* source = bin_.data() + begin * static_cast<std::uint64_t>(id_bytes_);
    const auto copy_as = [&](auto zero) {
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(&zero, source + static_cast<std::size_t>(i) * sizeof(zero), sizeof(zero));
        out[i] = static_cast<std::int32_t>(zero);
      }
    };
    if (id_bytes_ == 1) {
      copy_as(std::uint8_t{});
    } else if (id_bytes_ == 2) {
      copy_as(std::uint16_t{});
    } else {
      copy_as(std::int32_t{});
    }
  }
  bool label_is_trained(std::uint64_t) const override { return true; }
  const StoreCounts& counts() const override { return counts_; }
  const std::vector<StoreFile>& files() const override { return files_; }

 private:
  template <typename T>
  T at(std::int64_t position) const {
    T value;
    std::memcpy(&value, idx_.data() + position, sizeof(T));
    return value;
  }
  std::int64_t offset(std::int64_t sequence) const {
    return at<std::int64_t>(offsets_ + 8 * sequence);
  }

  MappedFile bin_;
  MappedFile idx_;
  std::string name_;
  int id_bytes_ = 0;
  std::int64_t sequences_ = 0;
  std::int64_t lengths_ = 0;  // where the three lists begin
  std::int64_t offsets_ = 0;
  std::int64_t documents_ = 0;
  StoreCounts counts_;
  std::vector<StoreFile> files_;
};

template <typename T>
void put(AtomicFile& file, T value) {
  file.write(&value, sizeof(value));
}

}  // namespace

std::unique_ptr<TokenStore> open_megatron_store(const fs::path& bin) {
  return std::make_unique<MegatronStore>(bin);
}

MegatronWriter::MegatronWriter(const fs::path& prefix, bool wide)
    : wide_(wide), bin_(prefix.string() + ".bin"), idx_(prefix.string() + ".idx") {}

void MegatronWriter::add_document(const std::vector<std::int32_t>& ids) {
  CHECK_USER(ids.size() <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()),
             "[data] a document of {} tokens is too long for a Megatron index", ids.size());
  for (const std::int32_t id : ids) {
    CHECK(id >= 0 && (wide_ || id <= 0xFFFF), "[data] token id {} does not fit two bytes", id);
    if (wide_) {
      put(bin_, id);
    } else {
      put(bin_, static_cast<std::uint16_t>(id));
    }
  }
  lengths_.push_back(static_cast<std::int32_t>(ids.size()));
}

void MegatronWriter::commit() {
  idx_.write(kMagic, sizeof(kMagic));
  put(idx_, std::uint64_t{1});
  put(idx_, static_cast<std::uint8_t>(wide_ ? kInt32 : kUint16));
  put(idx_, static_cast<std::uint64_t>(lengths_.size()));
  put(idx_, static_cast<std::uint64_t>(lengths_.size() + 1));
  idx_.write(lengths_.data(), lengths_.size() * sizeof(std::int32_t));
  std::int64_t offset = 0;
  for (const std::int32_t length : lengths_) {
    put(idx_, offset);
    offset += std::int64_t{length} * (wide_ ? 4 : 2);
  }
  for (std::size_t i = 0; i <= lengths_.size(); ++i) put(idx_, static_cast<std::int64_t>(i));
  bin_.commit();
  idx_.commit();  // last: readers go by the index
}

}  // namespace tessera
