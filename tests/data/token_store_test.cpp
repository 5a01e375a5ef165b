// Stores of every kind: offsets past 2^31 and 2^32 (kind B25), Megatron files, exported token
// files, synthetic data, skip lists.
#include "data/token_store.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "data/export_tokens.h"
#include "data/megatron.h"
#include "data/pack_source.h"
#include "data/skip_list.h"
#include "data/synthetic.h"
#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::all_rows;
using test::DataTest;
using Ids = std::vector<std::int32_t>;

class Stores : public DataTest {
 protected:
  static Ids tokens_of(const TokenStore& store, std::int64_t document) {
    const DocumentEntry entry = store.document(document);
    Ids ids(entry.length);
    store.read(entry.begin, static_cast<std::int64_t>(entry.length), ids.data());
    return ids;
  }
};

TEST_F(Stores, OffsetsInASparseFilePastFourThousandMillion) {
  // 4.8e9 tokens of two bytes: 9 GiB of holes with a document at each of the dangerous places.
  const fs::path base = scratch.path() / "sparse";
  const std::uint64_t total = 4'800'000'000;
  const std::vector<std::uint64_t> begins = {0, (1ull << 31) - 3, (1ull << 32) - 3, total - 6};
  {
    const int fd = ::open((base.string() + ".tokens").c_str(), O_RDWR | O_CREAT, 0666);
    ASSERT_GE(fd, 0);
    if (::ftruncate(fd, static_cast<off_t>(total * 2)) != 0) {
      ::close(fd);
      GTEST_SKIP() << "the file system has no sparse files of 9 GiB";
    }
    std::ofstream docs(base.string() + ".docs", std::ios::binary);
    for (std::size_t i = 0; i < begins.size(); ++i) {
      std::uint16_t ids[6];
      for (int k = 0; k < 6; ++k)
        ids[k] = static_cast<std::uint16_t>(100 * (i + 1) + static_cast<std::size_t>(k));
      ASSERT_EQ(::pwrite(fd, ids, sizeof(ids), static_cast<off_t>(begins[i] * 2)), 12);
      const DocumentEntry entry{begins[i], 6, i, -1, 0};
      docs.write(reinterpret_cast<const char*>(&entry), sizeof(entry));
    }
    ::close(fd);
  }
  // A description as the writer gives it, with the sizes of this file.
  {
    TokenStoreWriter writer(scratch.path() / "small", false);
    writer.commit({}, {{"sparse.txt", 0}});
    auto description = nlohmann::json::parse(read_small_file(scratch.path() / "small.json"));
    description["tokens"] = total;
    description["documents"] = 4;
    description["rows_read"] = 4;
    std::ofstream(base.string() + ".json") << description.dump();
  }
  add_source(base.string() + ".tokens");
  settings.vocab_size = 0;
  const auto rows = all_rows(*prepare().train);
  ASSERT_EQ(rows.size(), 2u);  // three documents of five pairs each in the first row of 16
  EXPECT_EQ(rows[0].inputs,
            Ids({100, 101, 102, 103, 104, 200, 201, 202, 203, 204, 300, 301, 302, 303, 304}));
  EXPECT_EQ(rows[0].targets,
            Ids({101, 102, 103, 104, 105, 201, 202, 203, 204, 205, 301, 302, 303, 304, 305}));
  EXPECT_EQ(rows[1].inputs, Ids({400, 401, 402, 403, 404}));
}

TEST_F(Stores, RowsOverFiveThousandMillionTokens) {
  // One document of more than 2^32 tokens beside short ones.
  std::vector<StorePart> parts;
  parts.push_back(
      {make_synthetic_store({3, std::int64_t{1} << 31, std::int64_t{1} << 31}, 1000), 0, false});
  DocumentSet documents(std::move(parts));
  PackSettings pack;
  pack.sequence_length = 1 << 20;
  pack_source(documents, pack, scratch.path() / "rows", std::nullopt);
  const PackedRows rows(scratch.path() / "rows");
  EXPECT_EQ(rows.counts().target_tokens, 3 * ((std::int64_t{1} << 31) - 1));
  EXPECT_EQ(rows.size(), 3 * 2048);
  // The last full chunk of the last document.
  const Piece piece = rows[rows.size() - 2][0];
  std::uint64_t highest = 0;
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    for (const Piece& p : rows[row]) highest = std::max(highest, p.begin);
  }
  EXPECT_EQ(highest, (std::uint64_t{1} << 31) - (1 << 20));
  Ids inputs(piece.length), targets(piece.length);
  documents.read(piece, inputs.data(), targets.data());
  EXPECT_TRUE(std::equal(inputs.begin() + 1, inputs.end(), targets.begin()));
}

TEST_F(Stores, MegatronFilesRoundTrip) {
  for (const bool wide : {false, true}) {
    const fs::path prefix = scratch.path() / (wide ? "wide" : "narrow");
    const std::vector<Ids> documents = {{1, 2, 3}, {}, {4, 5, wide ? 70000 : 65535}, {6}};
    {
      MegatronWriter writer(prefix, wide);
      for (const Ids& ids : documents) writer.add_document(ids);
      writer.commit();
    }
    const auto store = open_megatron_store(prefix.string() + ".bin");
    ASSERT_EQ(store->num_documents(), 4);
    for (std::int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(tokens_of(*store, i), documents[static_cast<std::size_t>(i)]);
    }
  }
}

TEST_F(Stores, MegatronIndexIsWhatOthersRead) {
  MegatronWriter writer(scratch.path() / "a", false);
  writer.add_document({258, 2});
  writer.add_document({3});
  writer.commit();
  const std::string expected(
      "MMIDIDX\0\0"
      "\1\0\0\0\0\0\0\0"
      "\10"
      "\2\0\0\0\0\0\0\0"
      "\3\0\0\0\0\0\0\0"
      "\2\0\0\0"
      "\1\0\0\0"
      "\0\0\0\0\0\0\0\0"
      "\4\0\0\0\0\0\0\0"
      "\0\0\0\0\0\0\0\0"
      "\1\0\0\0\0\0\0\0"
      "\2\0\0\0\0\0\0\0",
      34 + 8 + 16 + 24);
  EXPECT_EQ(read_small_file(scratch.path() / "a.idx"), expected);
  EXPECT_EQ(read_small_file(scratch.path() / "a.bin"), std::string("\2\1\2\0\3\0", 6));
}

TEST_F(Stores, MegatronDocumentsOfSeveralSequencesAndDamage) {
  // Two documents; the first has two sequences.
  std::string index(
      "MMIDIDX\0\0"
      "\1\0\0\0\0\0\0\0"
      "\10"
      "\3\0\0\0\0\0\0\0"
      "\3\0\0\0\0\0\0\0"
      "\2\0\0\0"
      "\1\0\0\0"
      "\2\0\0\0"
      "\0\0\0\0\0\0\0\0"
      "\4\0\0\0\0\0\0\0"
      "\6\0\0\0\0\0\0\0"
      "\0\0\0\0\0\0\0\0"
      "\2\0\0\0\0\0\0\0"
      "\3\0\0\0\0\0\0\0",
      34 + 12 + 24 + 24);
  write("m.bin", std::string("\1\0\2\0\3\0\4\0\5\0", 10));
  write("m.idx", index);
  const fs::path bin = scratch.path() / "m.bin";
  EXPECT_EQ(tokens_of(*open_megatron_store(bin), 0), Ids({1, 2, 3}));
  EXPECT_EQ(tokens_of(*open_megatron_store(bin), 1), Ids({4, 5}));

  const auto fails = [&](const std::string& bytes) {
    write("m.idx", bytes);
    try {
      const auto store = open_megatron_store(bin);
      for (std::int64_t i = 0; i < store->num_documents(); ++i) tokens_of(*store, i);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUser;
    }
    return false;
  };
  EXPECT_TRUE(fails(""));
  EXPECT_TRUE(fails(index.substr(0, 60)));
  const auto with = [&](std::size_t at, char value) {
    std::string changed = index;
    changed[at] = value;
    return changed;
  };
  EXPECT_TRUE(fails(with(0, 'X')));
  EXPECT_TRUE(fails(with(9, 2)));        // version
  EXPECT_TRUE(fails(with(17, 7)));       // float ids
  EXPECT_TRUE(fails(with(25, '\x7f')));  // sequences past everything
  EXPECT_TRUE(fails(with(42, '\x7f')));  // a length past the end
  EXPECT_TRUE(fails(with(49, '\x40')));  // an offset past the end
  EXPECT_TRUE(fails(with(54, 8)));       // a gap between sequences
  EXPECT_TRUE(fails(with(78, 9)));       // a document past the sequences
}

TEST_F(Stores, MegatronFilesAreASource) {
  MegatronWriter writer(scratch.path() / "corpus", false);
  writer.add_document({1, 2, 3});
  writer.add_document({4, 5, 600});
  writer.commit();
  add_source((scratch.path() / "corpus.bin").string());
  settings.vocab_size = 512;
  settings.encoder = nullptr;
  const auto data = prepare().train;
  EXPECT_EQ(data->num_rows(), 1);
  // Its highest id is not known beforehand: the batch is checked.
  DataLoader loader(data, {.vocab_size = 512});
  try {
    loader.load(0, 0);
    FAIL() << "id 600 of 512 was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("token id 600"), std::string::npos);
  }
  fs::remove(scratch.path() / "corpus.idx");
  EXPECT_THROW(prepare(), Error);
}

TEST_F(Stores, ExportedTokenFilesGiveTheSameRows) {
  write("in/a.txt", "first text");
  write("in/b.jsonl",
        "{\"text\":\"second\"}\n{\"input_ids\":[1,2,3,4],\"labels\":[-100,-100,3,4]}\n"
        "{\"input_ids\":[5,6,7]}\n");
  add_source((scratch.path() / "in").string());
  const auto direct = prepare().train;
  const auto documents = prepare_documents(options.train, options, settings);
  const ExportCounts counts =
      export_tokens(documents, scratch.path() / "out" / "all", TokenFileKind::kTessera);
  EXPECT_EQ(counts.documents, 4);
  options.train[0].path = (scratch.path() / "out" / "all.tokens").string();
  const auto exported = prepare().train;
  EXPECT_EQ(exported->sources()[0].documents->alignment(), LabelAlignment::kAligned);
  const auto a = all_rows(*direct);
  const auto b = all_rows(*exported);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].inputs, b[i].inputs);
    EXPECT_EQ(a[i].targets, b[i].targets);
    EXPECT_EQ(direct->describe_row(static_cast<std::int64_t>(i)),
              exported->describe_row(static_cast<std::int64_t>(i)));
  }
  // Ids of the exported files are checked, too.
  settings.vocab_size = 100;
  EXPECT_THROW(prepare(), Error);
  // Megatron files cannot hold labels.
  EXPECT_THROW(export_tokens(documents, scratch.path() / "m", TokenFileKind::kMegatron), Error);
}

TEST_F(Stores, ExportToMegatronAndBack) {
  add_source(write("a.jsonl", "{\"text\":\"one\"}\n{\"text\":\"two and more\"}\n"));
  const auto direct = all_rows(*prepare().train);
  export_tokens(prepare_documents(options.train, options, settings), scratch.path() / "m",
                TokenFileKind::kMegatron);
  options.train[0].path = (scratch.path() / "m.bin").string();
  const auto back = all_rows(*prepare().train);
  ASSERT_EQ(direct.size(), back.size());
  for (std::size_t i = 0; i < back.size(); ++i) EXPECT_EQ(direct[i].inputs, back[i].inputs);
}

TEST_F(Stores, SyntheticData) {
  add_source("synthetic:100x10-40");
  const auto data = prepare().train;
  const auto rows = all_rows(*data);
  std::set<std::int32_t> ids;
  for (const auto& row : rows) {
    for (const std::int32_t id : row.inputs) {
      ASSERT_TRUE(id >= 0 && id < 259);
      ids.insert(id);
    }
  }
  EXPECT_GT(ids.size(), 250u);
  options.train[0].path = "synthetic:ten";
  EXPECT_THROW(prepare(), Error);
  options.train[0].path = "synthetic:10x1";
  EXPECT_THROW(prepare(), Error);
}

TEST_F(Stores, SkippedRecordsAndSteps) {
  std::string bytes;
  for (int i = 0; i < 10; ++i) bytes += "{\"input_ids\":[" + std::to_string(i) + ",1,2]}\n";
  options.packing = false;
  const std::string file = write("a.jsonl", bytes);
  add_source(file);
  options.skip_records =
      write("skip", "# bad rows\n" + file + " record 3 tokens 0-1\n\n" + file + " record 7\n");
  const auto data = prepare().train;
  EXPECT_EQ(data->num_rows(), 8);
  EXPECT_EQ(data->sources()[0].rows->counts().skipped, 2);
  for (const auto& row : all_rows(*data)) {
    EXPECT_NE(row.inputs[0], 3);
    EXPECT_NE(row.inputs[0], 7);
  }
  options.skip_records = write("skip2", "a.jsonl 3\n");
  EXPECT_THROW(prepare(), Error);

  const auto ranges = parse_step_ranges({"9", "3-5", "5-6"});
  ASSERT_EQ(ranges.size(), 2u);
  DataLoader all(data, {.seed = 3});
  DataLoader some(data, {.seed = 3, .skipped_steps = ranges});
  // Steps 3-6 and 9 counted from 1: data steps 2-5 and 8 counted from 0.
  const std::vector<std::int64_t> expected = {0, 1, 6, 7, 9, 10, 11};
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_EQ(some.rows_of_step(static_cast<std::int64_t>(step)), all.rows_of_step(expected[step]));
    EXPECT_EQ(some.load(static_cast<std::int64_t>(step), 0).row_ids,
              all.rows_of_step(expected[step]));
  }
  for (const char* bad : {"0", "5-3", "x", "-3", "1-"}) {
    EXPECT_THROW(parse_step_ranges({bad}), Error) << bad;
  }
}

// Ten million rows: TESSERA_SLOW_TESTS=1 (about a minute, 1.5 GB of disk). Says what it took.
TEST_F(Stores, TenMillionRowsInBoundedMemory) {
  if (std::getenv("TESSERA_SLOW_TESTS") == nullptr) GTEST_SKIP() << "set TESSERA_SLOW_TESTS=1";
  settings.sequence_length = 512;
  settings.vocab_size = 32000;
  options.packing = false;
  add_source("synthetic:10000000x100-513");
  const auto seconds = [start = std::chrono::steady_clock::now()] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto peak_mib = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss / 1024;
  };
  const long before = peak_mib();
  const auto data = prepare().train;
  std::printf("10M rows, unpacked: index %.1f s\n", seconds());
  EXPECT_EQ(data->num_rows(), 10'000'000);
  options.packing = true;
  const auto packed = prepare().train;
  std::printf(
      "10M records packed into %lld rows, %.2f%% full: %.1f s; peak memory grew by %ld MiB\n",
      static_cast<long long>(packed->num_rows()),
      100.0 * static_cast<double>(packed->sources()[0].rows->counts().pairs) /
          (512.0 * static_cast<double>(packed->num_rows())),
      seconds(), peak_mib() - before);
  // A resume at a late step costs what the first one costs.
  DataLoader loader(packed, {.micro_batch_size = 8, .seed = 1, .prefetch = 0});
  const double at = seconds();
  loader.load(0, 0);
  const double first = seconds();
  loader.load(50 * loader.steps_per_epoch() + 12345, 0);
  std::printf("first micro-batch %.4f s, one in epoch 51 %.4f s\n", first - at, seconds() - first);
}

}  // namespace
}  // namespace tessera
