#include "data/prepare.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <thread>

#include "data/content_hash.h"
#include "data/job_lock.h"
#include "data/megatron.h"
#include "data/pack_source.h"
#include "data/prepare_report.h"
#include "data/readers/source_files.h"
#include "data/shards.h"
#include "data/skip_list.h"
#include "data/synthetic.h"
#include "data/tokenize.h"
#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Changing what is stored, or how it is computed, changes every key.
constexpr std::string_view kLayout = "tessera data 2";

class Preparation {
 public:
  Preparation(const DataOptions& options, const PrepareSettings& settings)
      : options_(options),
        settings_(settings),
        cache_(data_cache_dir(options, settings.fallback_cache_dir)) {
    std::error_code problem = make_folders();
    if (problem && options.cache_dir.empty() && !settings.fallback_cache_dir.empty()) {
      cache_ = settings.fallback_cache_dir;  // a home folder that cannot be written to
      problem = make_folders();
    }
    CHECK_USER(!problem, "[data] the cache folder {} cannot be made: {}; set data.cache_dir",
               cache_.string(), problem.message());
    if (!options.skip_records.empty()) skip_list_ = RecordSkipList(options.skip_records);
  }

  // All sources are looked up before any work, so that a wrong path is found at once.
  void find_files(const std::vector<DataSource>& sources) {
    ContentHash lock_key;
    for (const DataSource& source : sources) {
      check_columns(source.columns);
      Found found{&source, 0, {}, std::nullopt};
      if (source.format == "synthetic" || is_synthetic(source.path)) {
        found.synthetic = parse_synthetic(source.path);
        lock_key.add(source.path);
      } else {
        const std::vector<SourceFile> files = find_source_files(source.path, source.format);
        found.files = files.size();
        for (const SourceFile& file : files) total_bytes_ += file.bytes;
        found.shards = cut_into_shards(files);
        for (const KeyedShard& shard : found.shards) lock_key.add(shard.key);
      }
      found_.push_back(std::move(found));
    }
    lock_.emplace(cache_ / "locks" / (lock_key.hex() + ".lock"));
  }

  std::vector<std::shared_ptr<const DocumentSet>> read_documents(std::vector<std::string>& report) {
    std::vector<std::shared_ptr<const DocumentSet>> sets;
    for (const Found& found : found_) {
      const SourceContent content = read_source(found);
      report.push_back(describe_content(*found.source, found.files, content.counts,
                                        content.documents->alignment()));
      sets.push_back(content.documents);
    }
    return sets;
  }

  struct Result {
    std::vector<PackedSource> kept;
    std::vector<PackedSource> held_out;
  };

  Result run(double eval_fraction, std::vector<std::string>& report) {
    CHECK(settings_.sequence_length > 0, "[data] sequence_length {}", settings_.sequence_length);
    Result result;
    for (const Found& found : found_) {
      const SourceContent content = read_source(found);
      PackSettings pack;
      pack.sequence_length = settings_.sequence_length;
      pack.packing = options_.packing;
      pack.overlong = options_.overlong;
      pack.max_records = found.source->max_rows.value_or(0);
      pack.held_out_fraction = eval_fraction;
      pack.skip_list = skip_list_.is_empty() ? nullptr : &skip_list_;
      const std::string key = rows_key(content, pack);
      const fs::path kept_path = cache_ / "rows" / (key + (eval_fraction > 0 ? "-train" : ""));
      const fs::path held_path = cache_ / "rows" / (key + "-eval");
      std::unique_ptr<PackedRows> kept = open_rows(kept_path);
      std::unique_ptr<PackedRows> held = eval_fraction > 0 ? open_rows(held_path) : nullptr;
      const auto is_complete = [&] { return kept && (held || eval_fraction == 0); };
      if (!is_complete()) {
        acquire_lock();
        kept = open_rows(kept_path);
        if (eval_fraction > 0) held = open_rows(held_path);
      }
      if (!is_complete()) {
        tell("packing " + found.source->path, 0, 0);
        pack_source(*content.documents, pack, kept_path,
                    eval_fraction > 0 ? std::optional<fs::path>(held_path) : std::nullopt);
        kept = std::make_unique<PackedRows>(kept_path);
        if (eval_fraction > 0) held = std::make_unique<PackedRows>(held_path);
      }
      report.push_back(describe_content(*found.source, found.files, content.counts,
                                        content.documents->alignment()));
      const auto add = [&](std::unique_ptr<PackedRows> rows, std::vector<PackedSource>& to,
                           const char* role) {
        report.push_back(
            describe_rows(*found.source, role, rows->counts(), settings_.sequence_length));
        to.push_back(
            {found.source->path, content.documents, std::move(rows), found.source->weight});
      };
      add(std::move(kept), result.kept, eval_fraction > 0 ? "training" : "");
      if (eval_fraction > 0) add(std::move(held), result.held_out, "held out");
    }
    return result;
  }

 private:
  struct Found {
    const DataSource* source;
    std::size_t files;
    std::vector<KeyedShard> shards;
    std::optional<SyntheticSpec> synthetic;
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
    std::vector<const Shard*> shards;  // beside parts, for messages
    if (found.synthetic) {
      const std::int64_t vocab_size = settings_.vocab_size > 0 || settings_.encoder == nullptr
                                          ? settings_.vocab_size
                                          : settings_.encoder->vocab_size;
      parts.push_back({make_synthetic_store(*found.synthetic, vocab_size), 0, false});
      key.add(found.source->path).add(vocab_size);
      content.counts.add(parts.back().store->counts());
    }
    const std::int64_t max_rows = found.source->max_rows.value_or(0);
    std::int64_t rows_of_file = 0;
    for (const KeyedShard& shard : found.shards) {
      const std::int64_t rest = max_rows > 0 ? max_rows - content.counts.rows_read : 0;
      if (max_rows > 0 && rest <= 0) break;
      auto [name, store] = open_shard(found, shard, rest);
      key.add(name);
      check_ids(*store, shard.ranges);
      if (!shard.continues_file) rows_of_file = 0;
      const std::int64_t rows = store->counts().rows_read;
      content.counts.add(store->counts());
      const bool is_text = std::all_of(
          shard.ranges.begin(), shard.ranges.end(),
          [](const FileRange& range) { return range.file.format == FileFormat::kText; });
      parts.push_back({std::move(store), rows_of_file, is_text});
      shards.push_back(&shard.ranges);
      rows_of_file += rows;
      for (const FileRange& range : shard.ranges) done_bytes_ += range.end - range.begin;
    }
    const auto conflict = [&](LabelAlignment alignment) {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const LabelEvidence& labels = parts[i].store->counts().labels;
        const RecordPlace& place = alignment == LabelAlignment::kAligned
                                       ? labels.first_aligned_conflict
                                       : labels.first_shifted_conflict;
        if (place.line > 0) return place_in(*shards[i], place);
      }
      return found.source->path;
    };
    const LabelAlignment alignment =
        choose_alignment(found.source->path, found.source->labels, content.counts.labels, conflict);
    content.documents = std::make_shared<DocumentSet>(std::move(parts));
    content.documents->set_alignment(alignment);
    content.key = key.hex();
    return content;
  }

  // The store of a shard, made if it is not in the cache, and the name that stands for its content.
  std::pair<std::string, std::unique_ptr<TokenStore>> open_shard(const Found& found,
                                                                 const KeyedShard& shard,
                                                                 std::int64_t max_rows) {
    const FileRange& first = shard.ranges[0];
    if (first.file.format == FileFormat::kTokens) {
      fs::path base = first.file.path;
      return {shard.key, open_token_store(base.replace_extension())};
    }
    if (first.file.format == FileFormat::kMegatron) {
      return {shard.key, open_megatron_store(first.file.path)};
    }
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
    hash.add(kLayout).add(shard.key).add(std::int64_t{tokenize.skip_bad_rows}).add(max_rows);
    hash.add(std::int64_t{needs_wide_tokens(tokenize)}).add(encoder_identity());
    for (const auto& [ours, theirs] : tokenize.columns) hash.add(ours).add(theirs);
    const std::string name = hash.hex();
    const fs::path path = cache_ / "tokens" / name;
    std::unique_ptr<TokenStore> store = open_cached(path);
    if (store == nullptr) {
      acquire_lock();
      store = open_cached(path);
    }
    if (store == nullptr) {
      std::string phase = "tokenising " + first.file.path.string();
      if (shard.ranges.size() > 1) phase += fmt::format(" and {} more", shard.ranges.size() - 1);
      auto last = std::chrono::steady_clock::now();
      tokenize.progress = [&](std::int64_t position) {
        const auto now = std::chrono::steady_clock::now();
        if (now - last < std::chrono::milliseconds(200)) return;
        last = now;
        tell(phase, done_bytes_ + position, total_bytes_);
      };
      tell(phase, done_bytes_, total_bytes_);
      tokenize_shard(shard.ranges, tokenize, path);
      store = open_token_store(path);
    }
    return {name, std::move(store)};
  }

  std::string encoder_identity() const {
    const TextEncoder* encoder = settings_.encoder;
    if (encoder == nullptr) return "";
    ContentHash hash;
    hash.add(encoder->fingerprint);
    for (const std::int32_t id : encoder->document_start) hash.add(std::int64_t{id});
    hash.add("text");
    for (const std::int32_t id : encoder->document_end) hash.add(std::int64_t{id});
    return hash.hex();
  }

  // What a killed process or a full disk left incomplete is made anew.
  static std::unique_ptr<TokenStore> open_cached(const fs::path& path) {
    if (!token_store_exists(path)) return nullptr;
    try {
      return open_token_store(path);
    } catch (const Error& error) {
      log::warning("{}; it is prepared anew", error.what());
      return nullptr;
    }
  }
  static std::unique_ptr<PackedRows> open_rows(const fs::path& path) {
    if (!PackedRows::exists(path)) return nullptr;
    try {
      return std::make_unique<PackedRows>(path);
    } catch (const Error& error) {
      log::warning("{}; it is prepared anew", error.what());
      return nullptr;
    }
  }

  static std::string place_in(const Shard& shard, const RecordPlace& place) {
    const auto file = static_cast<std::size_t>(place.file);
    if (file >= shard.size()) return "?";
    const FileFormat format = shard[file].file.format;
    const bool has_lines = format != FileFormat::kTokens && format != FileFormat::kMegatron;
    return has_lines ? place_of(shard[file], place.line) : shard[file].file.path.string();
  }

  // Tokens that the model has no embedding for are found before the first step. (Megatron files do
  // not say their highest id: the loader checks every batch.)
  void check_ids(const TokenStore& store, const Shard& shard) const {
    const StoreCounts& counts = store.counts();
    if (settings_.vocab_size == 0 || counts.max_id < settings_.vocab_size) return;
    const TextEncoder* encoder = settings_.encoder;
    TESSERA_FAIL(ErrorKind::kUser,
                 "[data] {}: token id {}{} is outside of the model's vocabulary of {}; use the "
                 "tokenizer of this model, or give its embeddings more rows with data.add_tokens",
                 place_in(shard, counts.max_id_place), counts.max_id,
                 encoder != nullptr && counts.max_id < encoder->vocab_size
                     ? fmt::format(" ({})", encoder->token_text(counts.max_id))
                     : "",
                 settings_.vocab_size);
  }

  static std::string rows_key(const SourceContent& content, const PackSettings& pack) {
    ContentHash hash;
    hash.add(kLayout).add(content.key).add(pack.sequence_length).add(std::int64_t{pack.packing});
    hash.add(pack.overlong).add(pack.max_records).add(fmt::format("{}", pack.held_out_fraction));
    hash.add(static_cast<std::int64_t>(content.documents->alignment()));
    hash.add(pack.skip_list != nullptr ? pack.skip_list->fingerprint() : "");
    return hash.hex();
  }

  std::error_code make_folders() const {
    std::error_code code;
    for (const char* folder : {"tokens", "rows", "locks"}) {
      if (!code) fs::create_directories(cache_ / folder, code);
      if (!code && ::access((cache_ / folder).c_str(), W_OK) != 0) {
        code = std::error_code(errno, std::generic_category());
      }
    }
    return code;
  }

  void acquire_lock() {
    if (lock_->is_held()) return;
    lock_->acquire([this](const std::string& note) {
      if (settings_.progress) {
        settings_.progress(
            {"waiting for another process" + (note.empty() ? "" : ": " + note), 0, 0});
      }
    });
    remove_abandoned_files(cache_ / "tokens");
    remove_abandoned_files(cache_ / "rows");
  }

  void tell(const std::string& phase, std::int64_t done, std::int64_t total) {
    if (settings_.progress) settings_.progress({phase, done, total});
    const std::string share = total > 0 ? fmt::format(" {}%", 100 * done / total) : std::string();
    lock_->set_note(phase + share);
  }

  const DataOptions& options_;
  const PrepareSettings& settings_;
  fs::path cache_;
  RecordSkipList skip_list_;
  std::vector<Found> found_;
  std::optional<JobLock> lock_;
  std::int64_t done_bytes_ = 0;
  std::int64_t total_bytes_ = 0;
};

// Weights are for training: evaluation takes every row once.
enum class Role { kTraining, kEvaluation };

// Data that would train nothing is a mistake of the input, not an empty success.
std::shared_ptr<const Dataset> make_dataset(std::vector<PackedSource> sources,
                                            std::int64_t sequence_length, Role role) {
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
  CHECK_USER(
      rows > 0,
      "[data] {} has no row for {} ({} too long and dropped, {} without a target, {} shorter "
      "than two tokens)",
      names, role == Role::kTraining ? "training" : "evaluation", lost.dropped, lost.without_target,
      lost.too_short);
  CHECK_USER(targets > 0, "[data] no token of {} would be trained", names);
  if (role == Role::kEvaluation) {
    for (PackedSource& source : sources) source.weight.reset();
  }
  return std::make_shared<Dataset>(std::move(sources), sequence_length);
}

}  // namespace

fs::path data_cache_dir(const DataOptions& options, const fs::path& fallback) {
  if (!options.cache_dir.empty()) return options.cache_dir;
  const auto variable = [](const char* name) -> fs::path {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  if (const fs::path cache = variable("XDG_CACHE_HOME"); cache.is_absolute())
    return cache / "tessera";
  if (const fs::path home = variable("HOME"); home.is_absolute())
    return home / ".cache" / "tessera";
  CHECK_USER(!fallback.empty(),
             "[data] there is no home folder to keep prepared data in; set "
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
  return make_dataset(std::move(result.kept), settings.sequence_length, Role::kEvaluation);
}

std::vector<std::shared_ptr<const DocumentSet>> prepare_documents(
    const std::vector<DataSource>& sources, const DataOptions& options,
    const PrepareSettings& settings, std::vector<std::string>* report) {
  CHECK_USER(!sources.empty(), "[data] no source is given");
  Preparation preparation(options, settings);
  preparation.find_files(sources);
  std::vector<std::string> lines;
  auto documents = preparation.read_documents(lines);
  if (report != nullptr) report->insert(report->end(), lines.begin(), lines.end());
  return documents;
}

PreparedData prepare_data(const DataOptions& options, const PrepareSettings& settings) {
  PreparedData data;
  if (!options.train.empty()) {
    const double held_out = options.eval.empty() ? options.eval_fraction : 0;
    Preparation preparation(options, settings);
    preparation.find_files(options.train);
    auto result = preparation.run(held_out, data.report);
    data.train = make_dataset(std::move(result.kept), settings.sequence_length, Role::kTraining);
    if (held_out > 0) {
      data.eval =
          make_dataset(std::move(result.held_out), settings.sequence_length, Role::kEvaluation);
    }
  }
  if (!options.eval.empty()) {
    data.eval = prepare_sources(options.eval, options, settings, &data.report);
  }
  return data;
}

}  // namespace tessera
