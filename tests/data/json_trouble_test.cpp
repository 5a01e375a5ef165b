// Encoding and line trouble in JSON records (kind B91): one file of ten lines each, the seventh is
// odd.
#include "data/readers/json_reader.h"
#include "data/readers/record.h"
#include "tests/data/data_test_support.h"

namespace tessera {
namespace {

using test::DataTest;

class JsonTrouble : public DataTest {
 protected:
  static std::string ten_lines(const std::string& seventh, const std::string& line_end = "\n") {
    std::string bytes;
    for (int i = 1; i <= 10; ++i) {
      bytes += i == 7 ? seventh : "{\"text\":\"row " + std::to_string(i) + "\"}";
      bytes += line_end;
    }
    return bytes;
  }

  StoreCounts counts_of(const std::string& name, const std::string& bytes) {
    const auto data = prepare_file(name, bytes);
    StoreCounts counts;
    for (const auto& part : data->sources()[0].documents->parts()) counts.add(part.store->counts());
    return counts;
  }

  // The seventh line must stop the run with its place, and be skipped and counted on request.
  void expect_bad(const std::string& name, const std::string& seventh, const std::string& reason) {
    SCOPED_TRACE(seventh);
    options.bad_rows = "stop";
    const std::string message = error_of_file(name, ten_lines(seventh));
    EXPECT_NE(message.find(name + ":7: "), std::string::npos) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    options.bad_rows = "skip";
    const StoreCounts counts = counts_of(name, ten_lines(seventh));
    EXPECT_EQ(counts.rows_read, 10);
    EXPECT_EQ(counts.rows_bad, 1);
    EXPECT_EQ(counts.documents, 9);
    EXPECT_NE(counts.first_bad.find(name + ":7: "), std::string::npos) << counts.first_bad;
  }

  // The text of a record with this line, or the reason why there is none.
  static std::string text_in(const std::string& json) {
    Record record;
    try {
      parse_record(json, {}, record);
    } catch (const RecordProblem& problem) {
      return std::string("! ") + problem.what();
    }
    return record.text;
  }
};

TEST_F(JsonTrouble, AcceptedForms) {
  const std::string good = "{\"text\":\"row 7\"}";
  EXPECT_EQ(counts_of("bom.jsonl", "\xEF\xBB\xBF" + ten_lines(good)).documents, 10);
  EXPECT_EQ(counts_of("crlf.jsonl", ten_lines(good, "\r\n")).documents, 10);
  EXPECT_EQ(counts_of("blank.jsonl", ten_lines("")).documents, 9);
  EXPECT_EQ(counts_of("spaces.jsonl", ten_lines("  \t ")).rows_read, 9);
  std::string open_end = ten_lines(good);
  open_end.pop_back();
  EXPECT_EQ(counts_of("open.jsonl", open_end).documents, 10);
  // U+2028 and U+0085 do not end a line.
  EXPECT_EQ(counts_of("separator.jsonl", ten_lines("{\"text\":\"a\xE2\x80\xA8"
                                                   "b\xC2\x85"
                                                   "c\"}"))
                .documents,
            10);
  EXPECT_EQ(counts_of("nul.jsonl", ten_lines("{\"text\":\"a\\u0000b\"}")).documents, 10);
  EXPECT_EQ(
      counts_of("huge.jsonl", ten_lines("{\"text\":\"a\",\"score\":1e400,\"n\":NaN}")).documents,
      10);
  EXPECT_EQ(counts_of("empty.jsonl", ten_lines("{\"text\":\"\"}")).rows_empty, 1);
}

TEST_F(JsonTrouble, RefusedForms) {
  expect_bad("gbk.jsonl", "{\"text\":\"\xC4\xE3\xBA\xC3\"}", "is not UTF-8");
  expect_bad("latin.jsonl", "{\"text\":\"caf\xE9\"}", "is not UTF-8");
  expect_bad("surrogate.jsonl", "{\"text\":\"\xED\xA0\x80\"}", "is not UTF-8");
  expect_bad("broken.jsonl", "{\"text\":\"row 7\"",
             "not valid JSON at byte 16: expected '}', got the end");
  expect_bad("open.jsonl", "{\"text\":\"row 7}", "does not end");
  expect_bad("two.jsonl", "{\"text\":\"a\"}{\"text\":\"b\"}", "expected the end after the record");
  expect_bad("double.jsonl", "{\"text\":\"a\",\"text\":\"b\"}", "\"text\" is given twice");
  expect_bad("array.jsonl", "[\"a\"]", "must be an object");
  expect_bad("number.jsonl", "{\"text\":5}", "text must be a string");
  expect_bad("null.jsonl", "{\"text\":null}", "neither \"text\" nor \"input_ids\" is there");
  expect_bad("control.jsonl", "{\"text\":\"a\tb\"}", "control character 0x09");
  expect_bad("nul.jsonl", std::string("{\"text\":\"a\0b\"}", 14), "control character 0x00");
  expect_bad("escape.jsonl", "{\"text\":\"a\\x\"}", "unknown escape");
  expect_bad("chat.jsonl", "{\"messages\":[],\"id\":3}", "this is a conversation (messages, id)");
  expect_bad("float.jsonl", "{\"input_ids\":[1,2.5]}", "got 2.5");
  expect_bad("big.jsonl", "{\"input_ids\":[1,99999999999999999999]}", "got 99999999999999999999");
  expect_bad("negative.jsonl", "{\"input_ids\":[1,-1]}", "input_ids[1] is -1");
  expect_bad("length.jsonl", "{\"input_ids\":[1,2],\"labels\":[1]}",
             "labels has 1 entries, expected 2");
  expect_bad("label.jsonl", "{\"input_ids\":[1,2],\"labels\":[1,-5]}", "labels[1] is -5");
  expect_bad("mask.jsonl", "{\"input_ids\":[1,2,3],\"attention_mask\":[1,0,1]}",
             "attention_mask is 0 at position 1");
}

TEST_F(JsonTrouble, Utf16IsNamed) {
  EXPECT_NE(error_of_file("a.jsonl", std::string("\xFF\xFE{\0\"\0", 6)).find("UTF-16"),
            std::string::npos);
}

TEST_F(JsonTrouble, BrokenArraysStopWithTheirLine) {
  EXPECT_NE(error_of_file("a.json", "[{\"text\":\"a\"}\n{\"text\":\"b\"}]")
                .find("a.json:2: expected ','"),
            std::string::npos);
  EXPECT_NE(error_of_file("b.json", "[{\"text\":\"a\"},\n]")
                .find("b.json:2: the array ends behind a comma"),
            std::string::npos);
  EXPECT_NE(
      error_of_file("c.json", "[{\"text\":\"a\"},\n{\"text\":\"b\"").find("c.json:2: the record"),
      std::string::npos);
  EXPECT_NE(error_of_file("d.json", "[{\"text\":\"a\"}").find("ends before its array"),
            std::string::npos);
  EXPECT_NE(error_of_file("e.json", "[{\"text\":\"a\"}] x").find("more text follows"),
            std::string::npos);
  EXPECT_NE(error_of_file("f.json", "[{\"text\":\"a\"},\n\n7]")
                .find("f.json:3: a record must be an object"),
            std::string::npos);
}

TEST_F(JsonTrouble, Strings) {
  EXPECT_EQ(text_in(R"({"text":"\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\ude00"})"),
            "\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  const std::string mark = "\xEF\xBF\xBD";  // U+FFFD
  EXPECT_EQ(text_in(R"({"text":"a\ud83eb"})"), "a" + mark + "b");
  EXPECT_EQ(text_in(R"({"text":"\ude00\ud83d"})"), mark + mark);
  EXPECT_EQ(text_in(R"({"text":"\ud83d\u0041"})"), mark + "A");
  EXPECT_EQ(text_in(R"({"text":"\ud83d\ud83d\ude00"})"), mark + "\xF0\x9F\x98\x80");
  EXPECT_EQ(text_in("{\"text\":\"a\\u0000b\"}"), std::string("a\0b", 3));
}

TEST_F(JsonTrouble, DeepNestingIsBounded) {
  EXPECT_EQ(text_in("{\"x\":" + std::string(500, '[') + std::string(500, ']') + ",\"text\":\"a\"}"),
            "a");
  EXPECT_NE(
      text_in("{\"x\":" + std::string(100000, '[') + ",\"text\":\"a\"}").find("nested deeper"),
      std::string::npos);
}

TEST_F(JsonTrouble, OneLongRow) {
  const std::string text(5000000, 'y');
  settings.sequence_length = 1024;
  const auto data = prepare_file("long.jsonl", "{\"text\":\"" + text + "\"}\n");
  EXPECT_EQ(data->num_rows(), (5000000 + 1023) / 1024);
}

TEST_F(JsonTrouble, BadUtf8InTextFiles) {
  std::string message = error_of_file("a.txt", "fine\nfine\nbad \xFF\n");
  EXPECT_NE(message.find("a.txt:1: byte 0xff 2 lines further down is not UTF-8"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace tessera
