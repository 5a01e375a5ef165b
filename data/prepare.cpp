#include "data/prepare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <thread>

#include "data/content_hash.h"
#include "data/job_lock.h"
#include "data/pack_source.h"
#include "data/readers/byte_stream.h"
#include "data/readers/source_files.h"
#include "data/tokenize.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Changing what is stored, or how it is computed, changes every key.
constexpr std::string_view kLayout = "tessera data 1";

std::string file_identity(const SourceFile& file) {
  struct stat info {};
  CHECK_USER(::stat(file.path.c_str(), &info) == 0, "[data] {} cannot be read",
             file.path.string());
  constexpr std::int64_t kSample = 64 << 10;
  ContentHash hash;
  hash.add(file.path.string()).add(static_cast<std::int64_t>(info.st_size));
  hash.add(static_cast<std::int64_t>(info.st_mtim.tv_sec))
      .add(static_cast<std::int64_t>(info.st_mtim.tv_nsec));
  const int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK_USER(fd >= 0, "[data] {} cannot be opened", file.path.string());
  std::string sample(kSample, '\0');
  for (const std::int64_t from :
       {std::int64_t{0}, std::max<std::int64_t>(0, info.st_size - kSample)}) {
    const ssize_t got = ::pread(fd, sample.data(), sample.size(), from);
    hash.add(std::string_view(sample.data(), got > 0 ? static_cast<std::size_t>(got) : 0));
  }
  ::close(fd);
  return hash.hex();
}

// Ranges small enough that a killed preparation loses little, few enough that the cache stays tidy.
// A function of the file alone: the key of each range must not change from run to run.
std::vector<FileRange> cut_into_ranges(const SourceFile& file) {
  constexpr std::int64_t kMiB = 1 << 20;
  const bool can_cut = !file.is_compressed && (file.format == FileFormat::kJsonLines ||
                                               file.format == FileFormat::kLines);
  const std::int64_t step =
      can_cut ? std::clamp((file.bytes / 256 + kMiB - 1) / kMiB * kMiB, 32 * kMiB, 1024 * kMiB)
              : std::max<std::int64_t>(file.bytes, 1);
  std::vector<FileRange> ranges;
  for (std::int64_t begin = 0; begin == 0 || begin < file.bytes; begin += step) {
    ranges.push_back({file, begin, std::min(begin + step, file.bytes)});
  }
  return ranges;
}

class Preparation {
 public:
  Preparation(const DataOptions& options, const PrepareSettings& settings)
      : options_(options),
        settings_(settings),
        cache_(data_cache_dir(options, settings.fallback_cache_dir)) {
    CHECK(settings.sequence_length > 0, "[data] sequence_length {}", settings.sequence_length);
    std::error_code code;
    for (const char* folder : {"tokens", "rows", "locks"}) {
      fs::create_directories(cache_ / folder, code);
      CHECK_USER(!code, "[data] the cache folder {} cannot be made: {}; set data.cache_dir",
                 (cache_ / folder).string(), code.message());
    }
  }

  // All sources are looked up before any work, so that a wrong path is found at once.
  void find_files(const std::vector<DataSource>& sources) {
    for (const DataSource& source : sources) {
      check_columns(source.columns);
      Found found{&source, {}, {}};
      for (const SourceFile& file : find_source_files(source.path, source.format)) {
        found.identities.push_back(file_identity(file));
        found.files.push_back(file);
        total_bytes_ += file.bytes;
        lock_key_.add(found.identities.back());
      }
      found_.push_back(std::move(found));
    }
    lock_.emplace(cache_ / "locks" / (lock_key_.hex() + ".lock"));
  }

  struct Result {
    std::vector<PackedSource> kept;
    std::vector<PackedSource> held_out;
  };

  Result run(double eval_fraction, std::vector<std::string>& report) {
    Result result;
    for (const Found& found : found_) {
      SourceContent content = read_source(found);
      PackSettings pack;
      pack.sequence_length = settings_.sequence_length;
      pack.packing = options_.packing;
      pack.overlong = options_.overlong;
      pack.max_records = found.source->max_rows.value_or(0);
      pack.held_out_fraction = eval_fraction;
      const std::string key = rows_key(content.key, pack, content.documents->alignment());
      const fs::path kept = cache_ / "rows" / (key + (eval_fraction > 0 ? "-train" : ""));
      const fs::path held_out = cache_ / "rows" / (key + "-eval");
      const auto exists = [&] {
        return PackedRows::exists(kept) && (eval_fraction == 0 || PackedRows::exists(held_out));
      };
      if (!exists()) {
        acquire_lock();
        if (!exists()) {
          tell("packing " + found.source->path, 0, 0);
          pack_source(*content.documents, pack, kept,
                      eval_fraction > 0 ? std::optional<fs::path>(held_out) : std::nullopt);
        }
      }
      const auto add = [&](const fs::path& path, std::vector<PackedSource>& to, const char* role) {
        PackedSource source;
        source.name = found.source->path;
        source.documents = content.documents;
        source.rows = std::make_unique<PackedRows>(path);
        source.weight = found.source->weight;
        report.push_back(describe_packing(source, role));
        to.push_back(std::move(source));
      };
      report.push_back(describe_content(found, content));
      add(kept, result.kept, eval_fraction > 0 ? "training" : "");
      if (eval_fraction > 0) add(held_out, result.held_out, "held out");
    }
    return result;
  }

 private:
  struct Found {
    const DataSource* source;
    std::vector<SourceFile> files;
    std::vector<std::string> identities;
  };

  struct SourceContent {
    std::shared_ptr<DocumentSet> documents;
    StoreCounts counts;
    std::string key;  // of all stores
  };

  SourceContent read_source(const Found& found) {
    SourceContent content;
    ContentHash key;
    std::vector<StorePart> parts;
    std::vector<FileRange> ranges;  // beside parts, for messages
    const std::int64_t max_rows = found.source->max_rows.value_or(0);
    for (std::size_t i = 0; i < found.files.size(); ++i) {
      std::int64_t rows_of_file = 0;
      for (const FileRange& range : cut_into_ranges(found.files[i])) {
        const std::int64_t rest = max_rows > 0 ? max_rows - content.counts.rows_read : 0;
        if (max_rows > 0 && rest <= 0) break;
        auto [path, store] = open_range(found, range, found.identities[i], rest);
        key.add(path.string());
        check_ids(*store, range);
        StorePart part;
        part.file = range.file.path.string();
        part.first_row = rows_of_file;
        part.is_text = range.file.format == FileFormat::kText;
        rows_of_file += store->counts().rows_read;
        content.counts.add(store->counts());
        part.store = std::move(store);
        parts.push_back(std::move(part));
        ranges.push_back(range);
      }
      done_bytes_ += found.files[i].bytes;
    }
    const LabelAlignment alignment = choose_alignment(*found.source, content.counts, parts, ranges);
    content.documents = std::make_shared<DocumentSet>(std::move(parts));
    content.documents->set_alignment(alignment);
    content.key = key.hex();
    return content;
  }

  // The store of a range, made if it is not in the cache.
  std::pair<fs::path, std::unique_ptr<TokenStore>> open_range(const Found& found,
                                                              const FileRange& range,
                                                              const std::string& identity,
                                                              std::int64_t max_rows) {
    const FileFormat format = range.file.format;
    if (format == FileFormat::kTokens) {
      fs::path base = range.file.path;
      base.replace_extension();
      return {base.string() + identity, open_token_store(base)};
    }
    CHECK_USER(format != FileFormat::kMegatron, "[data] Megatron files");
    TokenizeSettings tokenize;
    tokenize.encoder = settings_.encoder;
    tokenize.columns = found.source->columns;
    tokenize.skip_bad_rows = options_.bad_rows == "skip";
    tokenize.vocab_size = settings_.vocab_size;
    tokenize.max_rows = max_rows;
    tokenize.threads = settings_.threads > 0
                           ? settings_.threads
                           : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    ContentHash hash;
    hash.add(kLayout).add(identity).add(range.begin).add(range.end);
    hash.add(name_of(format)).add(std::int64_t{tokenize.skip_bad_rows}).add(max_rows);
    hash.add(std::int64_t{needs_wide_tokens(tokenize)});
    hash.add(settings_.encoder != nullptr ? settings_.encoder->fingerprint : "");
    for (const auto& [ours, theirs] : tokenize.columns) hash.add(ours).add(theirs);
    const fs::path path = cache_ / "tokens" / hash.hex();
    if (!token_store_exists(path)) {
      acquire_lock();
      if (!token_store_exists(path)) {
        const std::string phase = "tokenising " + range.file.path.string();
        auto last = std::chrono::steady_clock::time_point{};
        tokenize.progress = [&](std::int64_t position) {
          const auto now = std::chrono::steady_clock::now();
          if (now - last < std::chrono::milliseconds(200)) return;
          last = now;
          tell(phase, done_bytes_ + range.begin + position, total_bytes_);
        };
        tell(phase, done_bytes_ + range.begin, total_bytes_);
        tokenize_range(range, tokenize, path);
      }
    }
    return {path, open_token_store(path)};
  }

  // Tokens that the model has no embedding for are found before the first step.
  void check_ids(const TokenStore& store, const FileRange& range) const {
    const StoreCounts& counts = store.counts();
    if (settings_.vocab_size == 0 || counts.max_id < settings_.vocab_size) return;
    const TextEncoder* encoder = settings_.encoder;
    TESSERA_FAIL(ErrorKind::kUser,
                 "[data] {}: token id {}{} is outside of the model's vocabulary of {}; use the "
                 "tokenizer of this model, or give its embeddings more rows with data.add_tokens",
                 place_of(range, counts.max_id_line), counts.max_id,
                 encoder != nullptr && counts.max_id < encoder->vocab_size
                     ? fmt::format(" ({})", encoder->token_text(counts.max_id))
                     : "",
                 settings_.vocab_size);
  }

  // Decided over the whole source: a single row may look like both.
  static LabelAlignment choose_alignment(const DataSource& source, const StoreCounts& counts,
                                         const std::vector<StorePart>& parts,
                                         const std::vector<FileRange>& ranges) {
    const LabelEvidence& labels = counts.labels;
    if (labels.labelled_rows == 0) return LabelAlignment::kNone;
    CHECK_USER(labels.trained > 0,
               "[data] every label in {} is -100: nothing would be trained. Labels are token ids where "
               "the token is trained",
               source.path);
    const auto place = [&](std::int64_t LabelEvidence::*line) -> std::string {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::int64_t found = parts[i].store->counts().labels.*line;
        if (found > 0) return place_of(ranges[i], found);
      }
      return "?";
    };
    const bool fits_aligned = labels.aligned_conflicts == 0;
    const bool fits_shifted = labels.shifted_conflicts == 0;
    if (source.labels == "aligned" || source.labels == "shifted") {
      const bool aligned = source.labels == "aligned";
      CHECK_USER(aligned ? fits_aligned : fits_shifted,
                 "[data] {}: labels is set to {} but a label differs from the {} input id ({} such "
                 "labels); correct the labels, or set labels: {}",
                 place(aligned ? &LabelEvidence::aligned_conflict_line
                               : &LabelEvidence::shifted_conflict_line),
                 source.labels, aligned ? "same" : "next",
                 aligned ? labels.aligned_conflicts : labels.shifted_conflicts,
                 aligned ? "shifted" : "aligned");
      return aligned ? LabelAlignment::kAligned : LabelAlignment::kShifted;
    }
    CHECK_USER(fits_aligned || fits_shifted,
               "[data] the labels of {} are neither the input ids of the same position (first "
               "difference: {}) nor of the next one (first difference: {}); correct them, or leave "
               "them out to train every token",
               source.path, place(&LabelEvidence::aligned_conflict_line),
               place(&LabelEvidence::shifted_conflict_line));
    CHECK_USER(!(fits_aligned && fits_shifted),
               "[data] the labels of {} agree with the input ids of the same position and of the next "
               "one; say which is meant with labels: aligned (as in Hugging Face) or labels: shifted",
               source.path);
    return fits_aligned ? LabelAlignment::kAligned : LabelAlignment::kShifted;
  }

  static std::string rows_key(const std::string& content, const PackSettings& pack,
                              LabelAlignment alignment) {
    ContentHash hash;
    hash.add(kLayout).add(content).add(pack.sequence_length).add(std::int64_t{pack.packing});
    hash.add(pack.overlong).add(pack.max_records).add(fmt::format("{}", pack.held_out_fraction));
    hash.add(static_cast<std::int64_t>(alignment));
    return hash.hex();
  }

  static std::string describe_content(const Found& found, const SourceContent& content) {
    const StoreCounts& c = content.counts;
    std::string line =
        fmt::format("{}: {} file{}, {} record{}, {} tokens", found.source->path, found.files.size(),
                    found.files.size() == 1 ? "" : "s", c.rows_read, c.rows_read == 1 ? "" : "s",
                    c.tokens);
    if (c.rows_empty > 0) line += fmt::format("; {} empty left out", c.rows_empty);
    if (c.rows_bad > 0) {
      line += fmt::format("; {} unreadable skipped, the first {}", c.rows_bad, c.first_bad);
    }
    if (c.labels.labelled_rows > 0) {
      const bool aligned = content.documents->alignment() == LabelAlignment::kAligned;
      line += fmt::format("; labels {}", aligned ? "aligned with the inputs" : "already shifted");
    }
    return line;
  }

  std::string describe_packing(const PackedSource& source, const char* role) const {
    const PackingCounts& c = source.rows->counts();
    const double places = static_cast<double>(c.rows * settings_.sequence_length);
    std::string line = fmt::format(
        "{}{}{}: {} rows of {}, {} target tokens, {:.1f}% full", source.name, *role ? ", " : "",
        role, c.rows, settings_.sequence_length, c.target_tokens,
        c.rows > 0 ? 100.0 * static_cast<double>(c.pairs) / places : 0.0);
    if (c.split > 0) line += fmt::format("; {} long records split", c.split);
    if (c.cut > 0) line += fmt::format("; {} cut, losing {} tokens", c.cut, c.cut_pairs);
    if (c.dropped > 0) line += fmt::format("; {} too long and dropped", c.dropped);
    if (c.too_short > 0) line += fmt::format("; {} shorter than two tokens", c.too_short);
    if (c.without_target > 0) line += fmt::format("; {} without a target", c.without_target);
    return line;
  }

  void acquire_lock() {
    if (lock_->is_held()) return;
    lock_->acquire([this](const std::string& note) {
      if (settings_.progress) {
        settings_.progress({"waiting for another process" + (note.empty() ? "" : ": " + note), 0, 0});
      }
    });
    remove_leftovers(cache_ / "tokens");
    remove_leftovers(cache_ / "rows");
  }

  void tell(const std::string& phase, std::int64_t done, std::int64_t total) {
    if (settings_.progress) settings_.progress({phase, done, total});
    const std::string share =
        total > 0 ? fmt::format(" {}%", 100 * done / total) : std::string();
    lock_->set_note(phase + share);
  }

  const DataOptions& options_;
  const PrepareSettings& settings_;
  fs::path cache_;
  std::vector<Found> found_;
  ContentHash lock_key_;
  std::optional<JobLock> lock_;
  std::int64_t done_bytes_ = 0;
  std::int64_t total_bytes_ = 0;
};

// Data that would train nothing is a mistake of the input, not an empty success.
std::shared_ptr<const Dataset> make_dataset(std::vector<PackedSource> sources,
                                            std::int64_t sequence_length, const char* role) {
  std::string names;
  std::int64_t rows = 0;
  std::int64_t targets = 0;
  PackingCounts lost;
  for (const PackedSource& source : sources) {
    names += (names.empty() ? "" : ", ") + source.name;
    const PackingCounts& c = source.rows->counts();
    rows += c.rows;
    targets += c.target_tokens;
    lost.without_target += c.without_target;
    lost.dropped += c.dropped;
    lost.too_short += c.too_short;
  }
  CHECK_USER(rows > 0,
             "[data] {} has no row for {} ({} too long and dropped, {} without a target, {} shorter "
             "than two tokens)",
             names, role, lost.dropped, lost.without_target, lost.too_short);
  CHECK_USER(targets > 0, "[data] no token of {} would be trained", names);
  return std::make_shared<Dataset>(std::move(sources), sequence_length);
}

}  // namespace

fs::path data_cache_dir(const DataOptions& options, const fs::path& fallback) {
  if (!options.cache_dir.empty()) return options.cache_dir;
  const auto variable = [](const char* name) -> fs::path {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  if (const fs::path cache = variable("XDG_CACHE_HOME"); cache.is_absolute()) return cache / "tessera";
  if (const fs::path home = variable("HOME"); home.is_absolute()) return home / ".cache" / "tessera";
  CHECK_USER(!fallback.empty(), "[data] there is no home folder to keep prepared data in; set "
             "data.cache_dir");
  return fallback;
}

std::shared_ptr<const Dataset> prepare_sources(const std::vector<DataSource>& sources,
                                               const DataOptions& options,
                                               const PrepareSettings& settings,
                                               std::vector<std::string>* report) {
  CHECK_USER(!sources.empty(), "[data] no source is given");
  Preparation preparation(options, settings);
  preparation.find_files(sources);
  std::vector<std::string> lines;
  auto result = preparation.run(0, lines);
  if (report != nullptr) report->insert(report->end(), lines.begin(), lines.end());
  return make_dataset(std::move(result.kept), settings.sequence_length, "evaluation");
}

PreparedData prepare_data(const DataOptions& options, const PrepareSettings& settings) {
  PreparedData data;
  if (!options.train.empty()) {
    const double held_out = options.eval.empty() ? options.eval_fraction : 0;
    Preparation preparation(options, settings);
    preparation.find_files(options.train);
    auto result = preparation.run(held_out, data.report);
    data.train = make_dataset(std::move(result.kept), settings.sequence_length, "training");
    if (held_out > 0) {
      data.eval = make_dataset(std::move(result.held_out), settings.sequence_length, "evaluation");
    }
  }
  if (!options.eval.empty()) {
    data.eval = prepare_sources(options.eval, options, settings, &data.report);
  }
  return data;
}

}  // namespace tessera
