// DataLoader: micro-batches as a pure function of (step, micro-batch), so that a run can start at
// any step at once and any number of data-parallel ranks trains on the same rows in the same order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "data/batch.h"
#include "data/dataset.h"
#include "data/skip_list.h"

namespace tessera {

struct LoaderSettings {
  std::int64_t micro_batch_size = 1;
  std::int64_t gradient_accumulation = 1;  // micro-batches per step and rank
  int dp_rank = 0;
  int dp_size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;          // false: rows in the order of the index, as evaluation takes them
  std::int64_t vocab_size = 0;  // ids at or above it are an error; 0: not checked
  std::vector<StepRange> skipped_steps;  // data that is passed over (parse_step_ranges)
  int prefetch = 2;                      // micro-batches made ahead by a thread; 0: none
};

// Steps count from 0: step s is the update that makes s + 1 finished ones. With G =
// micro_batch_size x gradient_accumulation x dp_size, the step s of an epoch trains rows [s * G, (s
// + 1) * G) of that epoch's order. An epoch that G does not divide ends with a smaller step, to be
// normalised by its own target tokens; the next epoch starts afresh. Micro-batch m of rank r holds
// the rows m * (G / gradient_accumulation) + r * micro_batch_size on; rows that a smaller step
// lacks are empty (padding and no target), so all ranks make the same number of micro-batches. With
// skipped_steps the data of those steps is left out and that behind moves up.
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderSettings& settings);
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  std::int64_t rows_per_step() const;
  std::int64_t steps_per_epoch() const;
  std::int64_t epoch_of(std::int64_t step) const { return data_step(step) / steps_per_epoch(); }
  double epochs_after(std::int64_t steps) const;  // rows seen / rows of an epoch
  // Micro-batches of the step that hold a row on any rank; the others are empty everywhere.
  std::int64_t used_micro_batches(std::int64_t step) const;

  // Entries of MicroBatch::documents less one: the same for every micro-batch.
  std::int64_t max_documents() const;
  const Dataset& dataset() const { return *dataset_; }

  // The micro-batch of this rank. Called by one thread at a time; the following one is prefetched.
  // Throws kUser for an id outside of the vocabulary.
  MicroBatch load(std::int64_t step, std::int64_t micro_batch);

  // The row ids of the whole step, all ranks, in order.
  std::vector<std::int64_t> rows_of_step(std::int64_t step) const;
  // Where they come from: a line for each piece.
  std::vector<std::string> describe_step(std::int64_t step) const;

 private:
  struct Request {
    std::int64_t step = 0;
    std::int64_t micro_batch = 0;
    friend bool operator==(const Request&, const Request&) = default;
  };
  struct Ready {
    Request request;
    MicroBatch batch;
    std::exception_ptr error;
  };

  std::int64_t data_step(std::int64_t step) const {
    return data_step_of(settings_.skipped_steps, step);
  }
  MicroBatch make(const Request& request) const;
  Request after(const Request& request) const;
  void check_ids(const MicroBatch& batch) const;
  void prefetch_loop();

  std::shared_ptr<const Dataset> dataset_;
  LoaderSettings settings_;

  // The prefetched micro-batches follow each other; a load of any other one starts anew behind it.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ready> ready_;
  Request next_;                  // the one that the thread makes next
  std::uint64_t generation_ = 0;  // counts the new starts: what was begun before one is dropped
  bool started_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera
