// Megatron-LM's indexed data sets: PREFIX.bin holds token ids, PREFIX.idx where documents lie.
// Facts of the format: megatron/core/datasets/indexed_dataset.py of that project.
//   .idx: "MMIDIDX\0\0", u64 version 1, u8 type of the ids, u64 sequences, u64 entries of the
//   document list, then i32 length and i64 byte offset of each sequence, and i64 first sequence of
//   each document with the number of sequences at the end. All little-endian and unaligned.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "data/mapped_file.h"
#include "data/token_store.h"

namespace tessera {

// Opens the .bin file that has its .idx beside it. Sequences of one document must follow one
// another. Throws kUser for a damaged index and for ids that are no integers of 1, 2 or 4 bytes.
std::unique_ptr<TokenStore> open_megatron_store(const std::filesystem::path& bin);

class MegatronWriter {
 public:
  // Writes PREFIX.bin and PREFIX.idx; `wide` takes four bytes per id instead of two.
  MegatronWriter(const std::filesystem::path& prefix, bool wide);
  void add_document(const std::vector<std::int32_t>& ids);
  void commit();

 private:
  bool wide_;
  AtomicFile bin_;
  AtomicFile idx_;
  std::vector<std::int32_t> lengths_;
};

}  // namespace tessera
