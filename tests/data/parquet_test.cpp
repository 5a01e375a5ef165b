// Parquet sources. Without the Arrow libraries such a file is refused in words; with them its rows
// are what the same JSON lines are.
#include "data/readers/parquet_reader.h"

#include "tests/data/data_test_support.h"

#if TESSERA_WITH_PARQUET
#include <fmt/format.h>

#include <arrow/io/file.h>
#include <parquet/api/writer.h>
#endif

namespace tessera {
namespace {

using test::all_rows;
using test::DataTest;
using test::text_of;

class ParquetFiles : public DataTest {};

#if TESSERA_WITH_PARQUET

using ::parquet::ByteArray;
using ::parquet::LogicalType;
using ::parquet::Repetition;
using ::parquet::Type;
using ::parquet::schema::GroupNode;
using ::parquet::schema::NodePtr;
using ::parquet::schema::NodeVector;
using ::parquet::schema::PrimitiveNode;

using Strings = std::vector<std::optional<std::string>>;
using Lists = std::vector<std::optional<std::vector<std::int64_t>>>;

NodePtr text_column(const std::string& name) {
  return PrimitiveNode::Make(name, Repetition::OPTIONAL, LogicalType::String(), Type::BYTE_ARRAY);
}
// The three-level form of the format's specification.
NodePtr list_column(const std::string& name, Type::type type, Repetition::type element) {
  const NodePtr item = PrimitiveNode::Make("element", element, LogicalType::None(), type);
  const NodePtr entries = GroupNode::Make("list", Repetition::REPEATED, {item});
  return GroupNode::Make(name, Repetition::OPTIONAL, {entries}, LogicalType::List());
}

class FileWriter {
 public:
  FileWriter(const std::string& path, const NodeVector& columns,
             ::parquet::Compression::type compression) {
    const auto schema = std::static_pointer_cast<GroupNode>(
        GroupNode::Make("schema", Repetition::REQUIRED, columns));
    ::parquet::WriterProperties::Builder properties;
    properties.compression(compression)->data_pagesize(4096);
    writer_ = ::parquet::ParquetFileWriter::Open(
        ::arrow::io::FileOutputStream::Open(path).ValueOrDie(), schema, properties.build());
  }
  ~FileWriter() { writer_->Close(); }

  void begin_group() { group_ = writer_->AppendRowGroup(); }

  void add_texts(const Strings& texts) {
    auto* column = static_cast<::parquet::ByteArrayWriter*>(group_->NextColumn());
    for (const auto& text : texts) {
      const std::int16_t definition = text ? 1 : 0;
      const ByteArray value = text ? ByteArray(*text) : ByteArray();
      column->WriteBatch(1, &definition, nullptr, &value);
    }
    column->Close();
  }

  template <typename Writer, typename Value>
  void add_lists(const Lists& lists, bool has_required_elements) {
    auto* column = static_cast<Writer*>(group_->NextColumn());
    const std::int16_t full = has_required_elements ? 2 : 3;
    for (const auto& list : lists) {
      if (!list || list->empty()) {
        const std::int16_t definition = list ? 1 : 0;
        const std::int16_t repetition = 0;
        column->WriteBatch(1, &definition, &repetition, nullptr);
        continue;
      }
      std::vector<std::int16_t> definitions(list->size(), full);
      std::vector<std::int16_t> repetitions(list->size(), 1);
      repetitions[0] = 0;
      const auto values = std::make_unique<Value[]>(list->size());
      std::copy(list->begin(), list->end(), values.get());
      column->WriteBatch(static_cast<std::int64_t>(list->size()), definitions.data(),
                         repetitions.data(), values.get());
    }
    column->Close();
  }

 private:
  std::unique_ptr<::parquet::ParquetFileWriter> writer_;
  ::parquet::RowGroupWriter* group_ = nullptr;
};

std::vector<std::string> texts_of(const Dataset& dataset) {
  std::vector<std::string> texts;
  for (const auto& part : dataset.sources()[0].documents->parts()) {
    for (std::int64_t i = 0; i < part.store->num_documents(); ++i) {
      const DocumentEntry entry = part.store->document(i);
      std::vector<std::int32_t> ids(entry.length);
      part.store->read(entry.begin, static_cast<std::int64_t>(entry.length), ids.data());
      texts.push_back(text_of(ids));
    }
  }
  return texts;
}

TEST_F(ParquetFiles, TextsOfSeveralRowGroups) {
  ASSERT_TRUE(has_parquet());
  const std::string path = (scratch.path() / "a.parquet").string();
  {
    FileWriter file(path, {text_column("url"), text_column("content")},
                    ::parquet::Compression::SNAPPY);
    file.begin_group();
    file.add_texts({"u1", "u2", std::nullopt});
    file.add_texts({"one \"quoted\"\\\n\t\x01", "zwei \xC3\xA9", ""});
    file.begin_group();
    file.add_texts({"u4"});
    file.add_texts({std::string(20000, 'x')});
  }
  add_source(path);
  options.train[0].columns = {{"text", "content"}};
  const PreparedData data = prepare();
  EXPECT_EQ(texts_of(*data.train),
            (std::vector<std::string>{"one \"quoted\"\\\n\t\x01|", "zwei \xC3\xA9|",
                                      std::string(20000, 'x') + "|"}));
  EXPECT_NE(data.report[0].find("4 records"), std::string::npos) << data.report[0];
  EXPECT_NE(data.report[0].find("1 empty"), std::string::npos) << data.report[0];
}

TEST_F(ParquetFiles, TokenRowsAreThoseOfJsonLines) {
  const Lists ids = {{{1, 2, 3, 4}}, {{5, 6}}, {{}}, {{7, 8, 9}}};
  const Lists labels = {{{-100, -100, 3, 4}}, std::nullopt, {{}}, {{-100, 8, 9}}};
  const Lists mask = {{{1, 1, 1, 1}}, {{1, 1}}, {{}}, {{1, 1, 0}}};
  const std::string path = (scratch.path() / "a.parquet").string();
  {
    FileWriter file(path,
                    {list_column("input_ids", Type::INT32, Repetition::OPTIONAL),
                     list_column("labels", Type::INT64, Repetition::REQUIRED),
                     list_column("attention_mask", Type::BOOLEAN, Repetition::OPTIONAL)},
                    ::parquet::Compression::UNCOMPRESSED);
    file.begin_group();
    file.add_lists<::parquet::Int32Writer, std::int32_t>(ids, false);
    file.add_lists<::parquet::Int64Writer, std::int64_t>(labels, true);
    file.add_lists<::parquet::BoolWriter, bool>(mask, false);
  }
  add_source(path);
  const auto rows = all_rows(*prepare().train);
  const auto expected = all_rows(*prepare_file(
      "a.jsonl", R"({"input_ids":[1,2,3,4],"labels":[-100,-100,3,4],"attention_mask":[1,1,1,1]})"
                 "\n"
                 R"({"input_ids":[5,6],"attention_mask":[1,1]})"
                 "\n"
                 R"({"input_ids":[]})"
                 "\n"
                 R"({"input_ids":[7,8,9],"labels":[-100,8,9],"attention_mask":[1,1,0]})"
                 "\n"));
  ASSERT_EQ(rows.size(), expected.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].inputs, expected[i].inputs);
    EXPECT_EQ(rows[i].targets, expected[i].targets);
    EXPECT_EQ(rows[i].lengths, expected[i].lengths);
  }
}

// Row groups are the units of preparation: cut anywhere, every row comes once and has its number.
TEST_F(ParquetFiles, RangesMeetAtRowGroups) {
  const std::string path = (scratch.path() / "a.parquet").string();
  constexpr int kGroups = 5;
  constexpr int kRows = 1500;
  {
    FileWriter file(path, {text_column("text")}, ::parquet::Compression::UNCOMPRESSED);
    for (int group = 0; group < kGroups; ++group) {
      file.begin_group();
      Strings texts;
      for (int i = 0; i < kRows; ++i) texts.push_back(fmt::format("{} of {}", i, group));
      file.add_texts(texts);
    }
  }
  SourceFile source = find_source_files(path, "auto").at(0);
  for (const std::int64_t step : {source.bytes, source.bytes / 2, source.bytes / 9}) {
    std::int64_t rows = 0;
    for (std::int64_t begin = 0; begin < source.bytes; begin += step) {
      const FileRange range{source, begin, std::min(begin + step, source.bytes)};
      EXPECT_EQ(parquet_rows_before(range), rows);
      const auto reader = open_records(range, 1 << 20);
      for (RawRecord record; reader->next(record); ++rows) {
        EXPECT_EQ(record.bytes,
                  fmt::format("{{\"text\":\"{} of {}\"}}", rows % kRows, rows / kRows));
        if (rows == kRows) {
          EXPECT_EQ(place_of(range, record.line), source.path.string() + " row 1501");
        }
      }
      EXPECT_EQ(reader->position(), range.end - range.begin);
    }
    EXPECT_EQ(rows, kGroups * kRows);
  }
}

TEST_F(ParquetFiles, WhatDoesNotFitIsNamed) {
  const std::string path = (scratch.path() / "a.parquet").string();
  {
    FileWriter file(path, {text_column("question"), text_column("answer")},
                    ::parquet::Compression::UNCOMPRESSED);
    file.begin_group();
    file.add_texts({"q"});
    file.add_texts({"a"});
  }
  add_source(path);
  const auto message = [&] {
    try {
      prepare();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message().find("a.parquet row 1: neither \"text\""), std::string::npos) << message();
  EXPECT_NE(message().find("question, answer"), std::string::npos) << message();
  {
    FileWriter file(path, {list_column("text", Type::INT32, Repetition::OPTIONAL)},
                    ::parquet::Compression::UNCOMPRESSED);
    file.begin_group();
    file.add_lists<::parquet::Int32Writer, std::int32_t>({{{1}}}, false);
    // A list of integers under the name of the text: the record says what it must be.
  }
  EXPECT_NE(message().find("text must be a string"), std::string::npos) << message();
  const std::string bytes = [&] {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  write("a.parquet", bytes.substr(0, bytes.size() / 2));
  EXPECT_NE(message().find("a.parquet is not a Parquet file"), std::string::npos) << message();
}

#else

TEST_F(ParquetFiles, AreRefusedWithWhatToInstall) {
  EXPECT_FALSE(has_parquet());
  for (const char* name : {"a.parquet", "unknown"}) {
    const std::string message = error_of_file(name, "PAR1 and more");
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_NE(message.find("libparquet-dev"), std::string::npos) << message;
  }
}

#endif

}  // namespace
}  // namespace tessera
