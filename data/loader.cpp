#include "data/loader.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderSettings& settings)
    : dataset_(std::move(dataset)), settings_(settings) {
  CHECK(dataset_ != nullptr, "[data] a loader without a dataset");
  CHECK(settings.micro_batch_size > 0 && settings.gradient_accumulation > 0 &&
            settings.dp_size > 0 && settings.dp_rank >= 0 && settings.dp_rank < settings.dp_size,
        "[data] micro-batch {}, accumulation {}, rank {} of {}", settings.micro_batch_size,
        settings.gradient_accumulation, settings.dp_rank, settings.dp_size);
}

DataLoader::~DataLoader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::int64_t DataLoader::rows_per_step() const {
  return settings_.micro_batch_size * settings_.gradient_accumulation * settings_.dp_size;
}

std::int64_t DataLoader::steps_per_epoch() const {
  return (dataset_->epoch_rows() + rows_per_step() - 1) / rows_per_step();
}

double DataLoader::epochs_after(std::int64_t steps) const {
  const std::int64_t epoch = epoch_of(steps);
  const std::int64_t rows = (data_step(steps) - epoch * steps_per_epoch()) * rows_per_step();
  return static_cast<double>(epoch) +
         static_cast<double>(rows) / static_cast<double>(dataset_->epoch_rows());
}

std::int64_t DataLoader::used_micro_batches(std::int64_t step) const {
  const std::int64_t first = (data_step(step) % steps_per_epoch()) * rows_per_step();
  const std::int64_t rows = std::min(rows_per_step(), dataset_->epoch_rows() - first);
  const std::int64_t per_micro_batch = settings_.micro_batch_size * settings_.dp_size;
  return (rows + per_micro_batch - 1) / per_micro_batch;
}

std::int64_t DataLoader::max_documents() const {
  // Each row may be followed by padding, which is a document between two rows.
  return settings_.micro_batch_size * (dataset_->max_pieces() + 1);
}

std::vector<std::int64_t> DataLoader::rows_of_step(std::int64_t step) const {
  const std::int64_t epoch = epoch_of(step);
  const std::int64_t first = (data_step(step) - epoch * steps_per_epoch()) * rows_per_step();
  const std::int64_t end = std::min(first + rows_per_step(), dataset_->epoch_rows());
  std::vector<std::int64_t> rows;
  for (std::int64_t index = first; index < end; ++index) {
    rows.push_back(dataset_->row_at(settings_.seed, epoch, index, settings_.shuffle));
  }
  return rows;
}

std::vector<std::string> DataLoader::describe_step(std::int64_t step) const {
  std::vector<std::string> lines;
  for (const std::int64_t row : rows_of_step(step)) {
    for (std::string& line : dataset_->describe_row(row)) lines.push_back(std::move(line));
  }
  return lines;
}

MicroBatch DataLoader::make(const Request& request) const {
  const std::int64_t length = dataset_->sequence_length();
  const std::int64_t rows = settings_.micro_batch_size;
  MicroBatch batch;
  batch.rows = rows;
  batch.sequence_length = length;
  batch.inputs.assign(static_cast<std::size_t>(rows * length), 0);
  batch.targets.assign(static_cast<std::size_t>(rows * length), kIgnoredTarget);
  batch.positions.resize(static_cast<std::size_t>(rows * length));
  batch.documents = {0};

  const std::int64_t epoch = epoch_of(request.step);
  const std::int64_t first_of_step =
      (data_step(request.step) - epoch * steps_per_epoch()) * rows_per_step();
  const std::int64_t first =
      first_of_step + (request.micro_batch * settings_.dp_size + settings_.dp_rank) * rows;
  std::vector<std::int32_t> lengths;
  for (std::int64_t slot = 0; slot < rows; ++slot) {
    const std::int64_t begin = slot * length;
    const std::int64_t index = first + slot;
    if (index >= dataset_->epoch_rows()) {
      // An empty row: zeros, no target, and positions as in any padding.
      for (std::int64_t i = 0; i < length; ++i) {
        batch.positions[static_cast<std::size_t>(begin + i)] = static_cast<std::int32_t>(i);
      }
      batch.row_ids.push_back(-1);
      continue;
    }
    // What the rows before left unused becomes a document, as documents must follow one another.
    if (batch.documents.back() < begin) {
      batch.documents.push_back(static_cast<std::int32_t>(begin));
    }
    const std::int64_t row = dataset_->row_at(settings_.seed, epoch, index, settings_.shuffle);
    lengths.clear();
    batch.target_tokens +=
        dataset_->read_row(row, batch.inputs.data() + begin, batch.targets.data() + begin,
                           batch.positions.data() + begin, lengths);
    for (const std::int32_t count : lengths) {
      batch.documents.push_back(batch.documents.back() + count);
    }
    batch.row_ids.push_back(row);
  }
  const auto entries = static_cast<std::size_t>(max_documents() + 1);
  CHECK(batch.documents.size() <= entries, "[data] {} documents in a micro-batch for {}",
        batch.documents.size() - 1, max_documents());
  batch.documents.resize(entries, batch.documents.back());
  check_ids(batch);
  sort_tokens(batch.inputs, batch.order);
  return batch;
}

void DataLoader::check_ids(const MicroBatch& batch) const {
  if (settings_.vocab_size == 0) return;
  const auto is_outside = [this](std::int32_t id) { return id < 0 || id >= settings_.vocab_size; };
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    const std::int32_t target = batch.targets[i];
    const bool bad_target = target != kIgnoredTarget && is_outside(target);
    if (!bad_target && !is_outside(batch.inputs[i])) continue;
    const auto slot = i / static_cast<std::size_t>(batch.sequence_length);
    std::string origin;
    for (const std::string& line : dataset_->describe_row(batch.row_ids[slot])) {
      origin += (origin.empty() ? "" : "; ") + line;
    }
    TESSERA_FAIL(ErrorKind::kUser,
                 "[data] token id {} is outside of the model's vocabulary of {} ({})",
                 bad_target ? target : batch.inputs[i], settings_.vocab_size, origin);
  }
}

DataLoader::Request DataLoader::after(const Request& request) const {
  if (request.micro_batch + 1 < settings_.gradient_accumulation) {
    return {request.step, request.micro_batch + 1};
  }
  return {request.step + 1, 0};
}

MicroBatch DataLoader::load(std::int64_t step, std::int64_t micro_batch) {
  CHECK(step >= 0 && micro_batch >= 0 && micro_batch < settings_.gradient_accumulation,
        "[data] micro-batch {} of step {}; a step has {}", micro_batch, step,
        settings_.gradient_accumulation);
  const Request wanted{step, micro_batch};
  if (settings_.prefetch <= 0) return make(wanted);

  std::unique_lock lock(mutex_);
  const bool follows =
      started_ && (ready_.empty() ? next_ == wanted : ready_.front().request == wanted);
  if (!follows) {
    ready_.clear();
    ++generation_;
    next_ = wanted;
    started_ = true;
    if (!thread_.joinable()) thread_ = std::thread([this] { prefetch_loop(); });
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return !ready_.empty(); });
  Ready taken = std::move(ready_.front());
  ready_.pop_front();
  if (taken.error) started_ = false;
  lock.unlock();
  changed_.notify_all();
  if (taken.error) std::rethrow_exception(taken.error);
  return std::move(taken.batch);
}

void DataLoader::prefetch_loop() {
  std::unique_lock lock(mutex_);
  const auto depth = static_cast<std::size_t>(settings_.prefetch);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || (started_ && ready_.size() < depth); });
    if (stopping_) return;
    const Request request = next_;
    const std::uint64_t generation = generation_;
    lock.unlock();
    Ready made{request, {}, nullptr};
    try {
      made.batch = make(request);
    } catch (...) {
      made.error = std::current_exception();
    }
    lock.lock();
    if (generation != generation_) continue;
    const bool failed = made.error != nullptr;
    ready_.push_back(std::move(made));
    next_ = after(request);
    changed_.notify_all();
    // Nothing is made behind an error until someone asks anew.
    if (failed) changed_.wait(lock, [&] { return stopping_ || generation != generation_; });
  }
}

}  // namespace tessera
