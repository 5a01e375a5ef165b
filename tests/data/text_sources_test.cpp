// Text, lines, paragraphs, JSON in all its layouts, folders, patterns and compressed files.
#include <algorithm>
#include <cstdlib>
#include <set>

#if TESSERA_WITH_ZSTD
#include <zstd.h>
#endif

#include "data/readers/source_files.h"
#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

using test::all_rows;
using test::DataTest;
using test::text_of;

class TextSources : public DataTest {
 protected:
  // The texts of all documents; the byte tokenizer ends each with id 257, shown as '|'.
  std::vector<std::string> documents(const Dataset& dataset) {
    std::vector<std::string> texts;
    for (const auto& source : dataset.sources()) {
      for (const auto& part : source.documents->parts()) {
        for (std::int64_t i = 0; i < part.store->num_documents(); ++i) {
          const DocumentEntry entry = part.store->document(i);
          std::vector<std::int32_t> ids(entry.length);
          part.store->read(entry.begin, static_cast<std::int64_t>(entry.length), ids.data());
          texts.push_back(text_of(ids));
        }
      }
    }
    return texts;
  }

  std::vector<std::string> documents_of(const std::string& name, const std::string& bytes) {
    return documents(*prepare_file(name, bytes));
  }
};

using Texts = std::vector<std::string>;

TEST_F(TextSources, WholeFileIsOneDocument) {
  EXPECT_EQ(documents_of("a.txt", "one\n\ntwo\n"), Texts({"one\n\ntwo\n|"}));
  EXPECT_EQ(documents_of("b.txt", "no newline"), Texts({"no newline|"}));
  EXPECT_EQ(documents_of("c.txt",
                         "\xEF\xBB\xBF"
                         "dos\r\nlines\r\n"),
            Texts({"dos\nlines\n|"}));
}

TEST_F(TextSources, EndOfTextMarkSeparatesDocuments) {
  EXPECT_EQ(
      documents_of("a.txt", "one\n<|endoftext|>\ntwo\nthree<|endoftext|>four\n<|endoftext|>\n"),
      Texts({"one\n|", "two\nthree|", "four\n|"}));
}

TEST_F(TextSources, LinesAndParagraphs) {
  add_source(write("a.txt", "\n\none\ntwo\n  \n\nthree\r\nfour"));
  options.train[0].format = "paragraphs";
  EXPECT_EQ(documents(*prepare().train), Texts({"one\ntwo|", "three\nfour|"}));
  options.train[0].format = "lines";
  EXPECT_EQ(documents(*prepare().train), Texts({"one|", "two|", "three|", "four|"}));
}

TEST_F(TextSources, LongTextIsOneDocumentWhateverThePieces) {
  // Past the piece size, with and without line ends.
  std::string text;
  while (text.size() < 9000000)
    text += text.size() % 3 == 0 ? "a line of words\n" : "more and more ";
  const auto with_lines = documents_of("a.txt", text);
  ASSERT_EQ(with_lines.size(), 1u);
  EXPECT_TRUE(with_lines[0] == text + "|");
  std::string solid(9000001, 'x');
  for (std::size_t i = 0; i < solid.size(); i += 7) solid[i] = ' ';
  const auto one_line = documents_of("b.txt", solid);
  ASSERT_EQ(one_line.size(), 1u);
  EXPECT_TRUE(one_line[0] == solid + "|");
}

TEST_F(TextSources, JsonLayouts) {
  const Texts expected = {"one|", "two|", "three|"};
  EXPECT_EQ(
      documents_of("a.jsonl",
                   "{\"text\":\"one\"}\n{\"text\": \"two\", \"n\": 1}\n\n{\"text\":\"three\"}"),
      expected);
  EXPECT_EQ(documents_of("a.json",
                         "[{\"text\":\"one\"},\n {\"text\":\n\"two\"} , {\"text\":\"three\"}]\n"),
            expected);
  EXPECT_EQ(
      documents_of("b.json", "{\"text\":\"one\"}\n{\"text\":\"two\"}\n{\"text\":\"three\"}\n"),
      expected);
  EXPECT_EQ(
      documents_of("c.json", "{\n  \"text\": \"a {brace}\",\n  \"list\": [1, {\"x\": \"]\"}]\n}\n"),
      Texts({"a {brace}|"}));
  // An array in a .jsonl file is taken for what it is.
  EXPECT_EQ(
      documents_of("b.jsonl", "[\n{\"text\":\"one\"},{\"text\":\"two\"},{\"text\":\"three\"}\n]"),
      expected);
}

TEST_F(TextSources, UnknownNamesGoByTheirContent) {
  EXPECT_EQ(documents_of("rows", "{\"text\":\"one\"}\n{\"text\":\"two\"}\n"),
            Texts({"one|", "two|"}));
  EXPECT_EQ(documents_of("words.dat", "one\ntwo\n"), Texts({"one\ntwo\n|"}));
  EXPECT_NE(error_of_file("binary.dat", std::string("\x00\x01\x02\xff", 4)).find("format"),
            std::string::npos);
  EXPECT_NE(error_of_file("table.csv", "a,b").find("convert it to JSON lines"), std::string::npos);
}

TEST_F(TextSources, ColumnsNameTheFields) {
  add_source(write("a.jsonl", "{\"content\":\"one\",\"text\":7}\n"));
  options.train[0].columns = {{"text", "content"}};
  EXPECT_EQ(documents(*prepare().train), Texts({"one|"}));
  options.train[0].columns = {{"txet", "content"}};
  try {
    prepare();
    FAIL() << "an unknown column was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean text?"), std::string::npos);
  }
}

TEST_F(TextSources, FoldersAndPatterns) {
  write("books/b.txt", "bee");
  write("books/a.txt", "ay");
  write("books/deep/c.jsonl", "{\"text\":\"sea\"}\n");
  write("books/.hidden.txt", "no");
  write("books/README.pdf", "no");
  add_source((scratch.path() / "books").string());
  EXPECT_EQ(documents(*prepare().train), Texts({"ay|", "bee|", "sea|"}));
  options.train[0].path = (scratch.path() / "books" / "[ab].txt").string();
  EXPECT_EQ(documents(*prepare().train), Texts({"ay|", "bee|"}));
  options.train[0].path = (scratch.path() / "books" / "*.csv").string();
  EXPECT_THROW(prepare(), Error);
  options.train[0].path = (scratch.path() / "nowhere").string();
  EXPECT_THROW(prepare(), Error);
}

TEST_F(TextSources, CompressedFiles) {
  write("a.jsonl", "{\"text\":\"one\"}\n{\"text\":\"two\"}\n");
  const std::string base = (scratch.path() / "a.jsonl").string();
  if (std::system(("gzip -k " + base + " && cp " + base + ".gz " + base + ".2.gz && gzip -c " +
                   base + " >> " + base + ".2.gz")
                      .c_str()) != 0) {
    GTEST_SKIP() << "no gzip program";
  }
  add_source(base + ".gz");
  EXPECT_EQ(documents(*prepare().train), Texts({"one|", "two|"}));
  // Two members in one file.
  std::filesystem::rename(base + ".2.gz", scratch.path() / "twice.jsonl.gz");
  options.train[0].path = (scratch.path() / "twice.jsonl.gz").string();
  EXPECT_EQ(documents(*prepare().train), Texts({"one|", "two|", "one|", "two|"}));
  if (std::system(("zstd -q " + base).c_str()) == 0) {
    options.train[0].path = base + ".zst";
    EXPECT_EQ(documents(*prepare().train), Texts({"one|", "two|"}));
  }
  // Cut in the middle: an error that names the file, not a shorter data set.
  const auto size = std::filesystem::file_size(base + ".gz");
  std::filesystem::resize_file(base + ".gz", size - 12);
  options.train[0].path = base + ".gz";
  try {
    prepare();
    FAIL() << "a truncated file was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a.jsonl.gz ends in the middle"), std::string::npos);
  }
}

#if TESSERA_WITH_ZSTD
// As libraries write it by default: no checksum behind the last block, whose end does not fall on
// that of a read.
TEST_F(TextSources, ZstandardFramesWithoutAChecksum) {
  std::string lines;
  for (int i = 0; lines.size() < 300000; ++i) lines += "{\"text\":\"" + std::to_string(i) + "\"}\n";
  const auto count = std::count(lines.begin(), lines.end(), '\n');
  for (const std::size_t block : {1000, 70000, 200000}) {
    ZSTD_CCtx* context = ZSTD_createCCtx();
    std::string packed(ZSTD_compressBound(lines.size()) + 20 * (lines.size() / block + 1), '\0');
    ZSTD_outBuffer out{packed.data(), packed.size(), 0};
    for (std::size_t at = 0; at < lines.size(); at += block) {
      const std::size_t size = std::min(block, lines.size() - at);
      ZSTD_inBuffer in{lines.data() + at, size, 0};
      const bool is_last = at + size == lines.size();
      ASSERT_EQ(ZSTD_compressStream2(context, &out, &in, is_last ? ZSTD_e_end : ZSTD_e_flush), 0u);
    }
    ZSTD_freeCCtx(context);
    packed.resize(out.pos);
    const std::string name = "blocks" + std::to_string(block) + ".jsonl.zst";
    EXPECT_EQ(documents_of(name, packed).size(), static_cast<std::size_t>(count)) << block;
    EXPECT_NE(
        error_of_file("cut" + name, packed.substr(0, packed.size() - 5)).find("in the middle"),
        std::string::npos);
  }
}
#endif

TEST_F(TextSources, RangesOfALargeFileJoinWithoutLossOrDoubles) {
  // Longer than one range of 32 MiB, so it is cut; lines of many lengths lie across the cut.
  std::string bytes;
  std::size_t count = 0;
  while (bytes.size() < (std::size_t{33} << 20) + 12345) {
    bytes +=
        "{\"text\":\"" + std::to_string(count) + std::string(count * 977 % 5000, 'x') + "\"}\r\n";
    ++count;
  }
  const auto data = prepare_file("big.jsonl", bytes);
  ASSERT_EQ(data->sources()[0].documents->parts().size(), 2u);
  const auto texts = documents(*data);
  ASSERT_EQ(texts.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_EQ(texts[i], std::to_string(i) + std::string(i * 977 % 5000, 'x') + "|");
  }
  // A fault in the second range is named by its line in the file.
  bytes += "{\"text\":\"broken\n";
  EXPECT_NE(
      error_of_file("big2.jsonl", bytes).find("big2.jsonl:" + std::to_string(count + 1) + ":"),
      std::string::npos);
}

TEST_F(TextSources, MaxRowsReadsTheFirst) {
  add_source(write("a.jsonl", "{\"text\":\"one\"}\n{\"text\":\"two\"}\nbroken\n"));
  options.train[0].max_rows = 2;
  EXPECT_EQ(documents(*prepare().train), Texts({"one|", "two|"}));
}

}  // namespace
}  // namespace tessera
