#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <thread>

#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"
#include "engine/core/numeric.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using test::expect_error;
using test::TempFolder;

std::string length_bytes(std::uint64_t length) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i)
    bytes[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
  return bytes;
}

std::string file_bytes(std::string_view header, std::size_t data_bytes) {
  return length_bytes(header.size()) + std::string(header) + std::string(data_bytes, '\1');
}

struct BrokenFile {
  const char* label;
  std::string bytes;
  std::vector<std::string> message_parts;
};

void PrintTo(const BrokenFile& file, std::ostream* out) { *out << file.label; }

std::vector<BrokenFile> broken_files() {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  return {
      {"Empty", "", {"0 bytes"}},
      {"SevenBytes", "1234567", {"7 bytes"}},
      {"HeaderLengthAllOnes",
       length_bytes(~std::uint64_t{0}) + "{}",
       {"18446744073709551615", "limit"}},
      {"HeaderLengthWraps", length_bytes(~std::uint64_t{0} - 7) + "{}", {"limit"}},
      {"HeaderLengthTopBit", length_bytes(std::uint64_t{1} << 63) + "{}", {"limit"}},
      {"HeaderOver100MB", length_bytes(100'000'001) + "{}", {"100000001", "limit"}},
      {"HeaderLongerThanFile", length_bytes(3) + "{}", {"claims 3 bytes", "only 2"}},
      {"HeaderExactly100MBMissing", length_bytes(100'000'000) + "{}", {"only 2"}},
      {"HeaderZero", length_bytes(0), {"does not begin with '{'"}},
      {"HeaderBeginsWithBlank", file_bytes(" {}", 0), {"does not begin with '{'"}},
      {"HeaderIsList", file_bytes("[]", 0), {"does not begin with '{'"}},
      {"HeaderCut", file_bytes(R"({"a":{"dtype":"F32")", 0), {"not valid JSON"}},
      {"HeaderTrailingText", file_bytes(good + "x", 8), {"not valid JSON"}},
      {"HeaderTwoDocuments", file_bytes(good + "{}", 8), {"not valid JSON"}},
      {"HeaderBadUtf8", file_bytes("{\"\xff\":{}}", 0), {"not valid JSON"}},
      {"EndBeforeBegin",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}})", 8),
       {"bad", "before its begin"}},
      {"NegativeOffset",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":[-1,4]}})", 5),
       {"bad", "-1"}},
      {"OffsetAbove64Bits",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":[0,18446744073709551616]}})",
                  5),
       {"bad", "2^64"}},
      {"FractionalOffset",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":[0,5.0]}})", 5),
       {"bad", "whole number"}},
      {"OffsetIsString",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":["0",5]}})", 5),
       {"bad"}},
      {"OneOffset",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":[5]}})", 5),
       {"bad", "1 data_offsets"}},
      {"ThreeOffsets",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[5],"data_offsets":[0,5,5]}})", 5),
       {"bad", "3 data_offsets"}},
      {"SameRangeTwice",
       file_bytes(R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},)"
                  R"("b":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})",
                  16),
       {"inside tensor"}},
      {"Overlap",
       file_bytes(R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},)"
                  R"("b":{"dtype":"U8","shape":[8],"data_offsets":[15,23]}})",
                  23),
       {"tensor b", "inside tensor a"}},
      {"Hole",
       file_bytes(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
                  9),
       {"bytes 4 to 5", "tensor b"}},
      {"HoleAtBegin",
       file_bytes(R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5),
       {"bytes 0 to 1"}},
      {"TrailingBytes", file_bytes(good, 9), {"1 bytes after the last tensor a"}},
      {"DataWithoutTensors", file_bytes("{}", 1), {"1 bytes after the last tensor"}},
      {"CutByOneByte", file_bytes(good, 7), {"tensor a", "file holds 7", "cut short"}},
      {"OffsetsFarBehindFile",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[9223372036854775807],)"
                  R"("data_offsets":[0,9223372036854775807]}})",
                  4),
       {"bad"}},
      {"ShapeProductOverflows",
       file_bytes(
           R"({"bad":{"dtype":"F32","shape":[8589934592,8589934592],"data_offsets":[0,16]}})", 16),
       {"bad", "overflows"}},
      {"ShapeProductWrapsToRight",  // 2^62 * 4 elements wrap to 0 in 64 bits
       file_bytes(R"({"bad":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
                  0),
       {"bad", "overflows"}},
      {"BytesOverflow",
       file_bytes(R"({"bad":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})",
                  0),
       {"bad", "overflows"}},
      {"ZeroBesideOverflow",
       file_bytes(
           R"({"bad":{"dtype":"U8","shape":[0,8589934592,8589934592],"data_offsets":[0,0]}})", 0),
       {"bad", "overflows"}},
      {"DimAbove63Bits",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,4]}})",
                  4),
       {"bad", "18446744073709551615"}},
      {"NegativeDim",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}})", 4),
       {"bad", "dim of -4"}},
      {"TwoNegativeDims",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[-2,-2],"data_offsets":[0,4]}})", 4),
       {"bad", "dim of -2"}},
      {"ShapeTooSmall",
       file_bytes(R"({"bad":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", 8),
       {"bad", "holds 8 bytes", "F32 [1] takes 4"}},
      {"ShapeTooLarge",
       file_bytes(R"({"bad":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
       {"bad", "takes 12"}},
      {"NestedShape",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[[4]],"data_offsets":[0,4]}})", 4),
       {"bad", "a list"}},
      {"OddBitsOfF4",
       file_bytes(R"({"bad":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2),
       {"bad"}},
      {"UnknownDType",
       file_bytes(R"({"bad":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}})", 16),
       {"bad", "F128"}},
      {"DTypeIsNumber",
       file_bytes(R"({"bad":{"dtype":3,"shape":[1],"data_offsets":[0,16]}})", 16),
       {"bad"}},
      {"NoDType",
       file_bytes(R"({"bad":{"shape":[1],"data_offsets":[0,1]}})", 1),
       {"bad", "no dtype"}},
      {"NoShape",
       file_bytes(R"({"bad":{"dtype":"U8","data_offsets":[0,1]}})", 1),
       {"bad", "no shape"}},
      {"NoOffsets",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[1]}})", 1),
       {"bad", "no data_offsets"}},
      {"UnknownField",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}})", 1),
       {"bad", "strides"}},
      {"FieldTwice",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,1]}})", 1),
       {"bad", "shape twice"}},
      {"TensorTwice",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("bad":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                  8),
       {"bad", "given twice"}},
      {"TensorTwiceBySpelling",
       file_bytes(R"({"bad":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b\u0061d":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                  8),
       {"bad", "given twice"}},
      {"TensorIsNull", file_bytes(R"({"bad":null})", 0), {"bad", "null"}},
      {"TensorIsList", file_bytes(R"({"bad":[]})", 0), {"bad", "a list"}},
      {"MetadataNumber", file_bytes(R"({"__metadata__":{"step":3}})", 0), {"__metadata__", "step"}},
      {"MetadataNested", file_bytes(R"({"__metadata__":{"a":{}}})", 0), {"__metadata__"}},
      {"MetadataIsList", file_bytes(R"({"__metadata__":[]})", 0), {"__metadata__"}},
      {"MetadataTwice", file_bytes(R"({"__metadata__":{},"__metadata__":{}})", 0), {"twice"}},
      {"MetadataKeyTwice", file_bytes(R"({"__metadata__":{"a":"1","a":"2"}})", 0), {"twice"}},
      {"DeepNesting", file_bytes("{\"a\":" + std::string(2'000'000, '['), 0), {"a list"}},
      {"GitLfsPointer",
       "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
       {"git lfs pull"}},
      {"PyTorchFile", std::string("PK\x03\x04\0\0\0\x08zzzz", 12), {"PyTorch"}},
  };
}

class SafetensorsRefuses : public testing::TestWithParam<BrokenFile> {};

TEST_P(SafetensorsRefuses, WithFileAndTensorNamed) {
  const TempFolder folder;
  const auto path = folder.write("broken.safetensors", GetParam().bytes);
  const std::string text = expect_error(ErrorKind::kUser, {"[safetensors]", "broken.safetensors"},
                                        [&] { SafetensorsFile file(path); });
  for (const std::string& part : GetParam().message_parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
  }
  EXPECT_LT(text.size(), 1000u);
}

INSTANTIATE_TEST_SUITE_P(Broken, SafetensorsRefuses, testing::ValuesIn(broken_files()),
                         [](const auto& info) { return std::string(info.param.label); });

TEST(Safetensors, RefusesWhatIsNotAFile) {
  const TempFolder folder;
  expect_error(ErrorKind::kUser, {"missing.safetensors"},
               [&] { SafetensorsFile file(folder / "missing.safetensors"); });
  expect_error(ErrorKind::kUser, {"a folder"}, [&] { SafetensorsFile file(folder.path()); });
}

TEST(Safetensors, LongAndStrangeNamesStayPrintable) {
  const TempFolder folder;
  const std::string name(100'000, 'n');
  const auto path = folder.write(
      "x.safetensors",
      file_bytes("{\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1));
  const std::string text =
      expect_error(ErrorKind::kUser, {"nnnn", "100000 bytes"}, [&] { SafetensorsFile file(path); });
  EXPECT_LT(text.size(), 1000u);
  EXPECT_EQ(printable_name("a\nb\x1b[0m"), "a?b?[0m");
  EXPECT_EQ(printable_name(""), "\"\"");
}

// Every cut, and every changed byte of the header, is either refused or still consistent.
TEST(Safetensors, SurvivesEveryTruncationAndEveryByteFlip) {
  const std::string good =
      file_bytes(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],)"
                 R"("data_offsets":[0,12]},"b":{"dtype":"F32","shape":[],"data_offsets":[12,16]}})",
                 16);
  const auto parse = [](std::string_view bytes) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    return parse_safetensors_header(bytes.substr(8, length), bytes.size() - 8 - length, "f");
  };
  EXPECT_EQ(parse(good).tensors.size(), 2u);
  const TempFolder folder;
  for (std::size_t length = 0; length < good.size(); ++length) {
    const auto path = folder.write("cut.safetensors", std::string_view(good).substr(0, length));
    EXPECT_THROW(SafetensorsFile file(path), Error) << "cut to " << length;
  }
  for (std::size_t i = 8; i < good.size() - 16; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = good;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      try {
        std::uint64_t covered = 0;
        for (const SafetensorsTensor& tensor : parse(changed).tensors) covered += tensor.bytes();
        EXPECT_EQ(covered, 16u);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUser);
      }
    }
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const TempFolder folder;
  // Padding blanks, entries not in the order of their bytes, rank 0, empty tensors, a type that is
  // only skipped, an escaped name, no metadata.
  const auto path = folder.write(
      "ok.safetensors", file_bytes(R"({"late":{"dtype":"I16","shape":[2],"data_offsets":[4,8]},)"
                                   R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},)"
                                   R"("scalar":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},)"
                                   R"("\u00e9":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}}   )"
                                   "\n",
                                   8));
  const SafetensorsFile file(path);
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "scalar");
  EXPECT_EQ(file.get("scalar").numel(), 1);
  EXPECT_EQ(file.get("empty").numel(), 0);
  EXPECT_EQ(file.get("empty").rows(), 0);
  EXPECT_EQ(file.get("empty").cols(), 7);
  EXPECT_NE(file.find("\u00e9"), nullptr);
  EXPECT_EQ(file.find("absent"), nullptr);
  EXPECT_TRUE(file.metadata().empty());
  EXPECT_FALSE(file.get("late").dtype.has_value());
  char byte[4];
  expect_error(ErrorKind::kUser, {"late", "I16", "ok.safetensors"},
               [&] { file.read_elements(file.get("late"), 0, 1, byte); });
  expect_error(ErrorKind::kUser, {"ok.safetensors", "absent"}, [&] { file.get("absent"); });
  file.read_elements(file.get("empty"), 0, 0, nullptr);
  file.read_rectangle(file.get("empty"), {0, 0, 0, 7}, nullptr);

  const SafetensorsFile nothing(folder.write("none.safetensors", file_bytes("{}", 0)));
  EXPECT_TRUE(nothing.tensors().empty());
}

// B57: the bytes of the format, written out by hand.
TEST(Safetensors, ReadsGoldenLittleEndianBytes) {
  const TempFolder folder;
  const std::string header = R"({"bf16":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
                             R"("f32":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},)"
                             R"("i64":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}})";
  const std::string data("\x80\x3f\x00\xc0\x00\x00\x80\x3f\x02\x01\x00\x00\x00\x00\x00\x80", 16);
  const SafetensorsFile file(
      folder.write("golden.safetensors", length_bytes(header.size()) + header + data));
  bf16 b[2];
  file.read_elements(file.get("bf16"), 0, 2, b);
  EXPECT_EQ(static_cast<float>(b[0]), 1.0f);
  EXPECT_EQ(static_cast<float>(b[1]), -2.0f);
  float f = 0;
  file.read_elements(file.get("f32"), 0, 1, &f);
  EXPECT_EQ(f, 1.0f);
  std::int64_t i = 0;
  file.read_elements(file.get("i64"), 0, 1, &i);
  EXPECT_EQ(i, std::numeric_limits<std::int64_t>::min() + 258);
}

struct RectangleCase {
  std::int64_t rows, cols;
};

class SafetensorsRectangle : public testing::TestWithParam<RectangleCase> {};

// Element (r, c) holds r * cols + c, so any slice can be checked; sizes reach each reading strategy
// (whole rows at once, bounced rows in several batches, one read per row).
TEST_P(SafetensorsRectangle, ReadsAnyPartExactly) {
  const auto [rows, cols] = GetParam();
  const TempFolder folder;
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::size_t bytes = values.size() * sizeof(float);
  const std::string header =
      "{\"pad\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"m\":{\"dtype\":\"F32\","
      "\"shape\":[" +
      std::to_string(rows) + "," + std::to_string(cols) + "],\"data_offsets\":[3," +
      std::to_string(3 + bytes) + "]}}";
  std::string contents = length_bytes(header.size()) + header + "abc";
  contents.append(reinterpret_cast<const char*>(values.data()), bytes);
  const SafetensorsFile file(folder.write("m.safetensors", contents));
  const SafetensorsTensor& tensor = file.get("m");

  const std::vector<std::int64_t> every_row = {0, 1, rows / 2, rows - 1, rows};
  const std::vector<std::int64_t> every_col = {0, 1, cols / 3, cols - 1, cols};
  const bool large = rows * cols > 100'000;
  const auto row_edges = large ? std::vector<std::int64_t>{0, 1, rows} : every_row;
  const auto col_edges = large ? std::vector<std::int64_t>{0, cols / 3, cols} : every_col;
  for (const std::int64_t r0 : row_edges) {
    for (const std::int64_t r1 : row_edges) {
      for (const std::int64_t c0 : col_edges) {
        for (const std::int64_t c1 : col_edges) {
          if (r1 < r0 || c1 < c0) continue;
          const TensorRectangle part{r0, r1 - r0, c0, c1 - c0};
          for (const std::int64_t gap : {0, 5}) {
            const std::int64_t stride = part.col_count + gap;
            std::vector<float> got(static_cast<std::size_t>(part.row_count * stride) + 1, -7.0f);
            file.read_rectangle(tensor, part, got.data(), stride);
            std::int64_t wrong = 0;
            for (std::int64_t r = 0; r < part.row_count; ++r) {
              for (std::int64_t c = 0; c < stride; ++c) {
                const float wanted =
                    c < part.col_count ? static_cast<float>((r0 + r) * cols + c0 + c) : -7.0f;
                wrong += got[static_cast<std::size_t>(r * stride + c)] != wanted;
              }
            }
            EXPECT_EQ(wrong, 0) << r0 << " " << r1 << " " << c0 << " " << c1 << " gap " << gap;
            EXPECT_EQ(got.back(), -7.0f);
          }
        }
      }
    }
  }
  expect_error(ErrorKind::kInternal, {"m"}, [&] {
    file.read_rectangle(tensor, {0, rows + 1, 0, 1}, values.data());
  });
  expect_error(ErrorKind::kInternal, {"m"}, [&] {
    file.read_rectangle(tensor, {0, 1, cols, 1}, values.data());
  });
  expect_error(ErrorKind::kInternal, {"m"},
               [&] { file.read_elements(tensor, rows * cols, 1, values.data()); });
  expect_error(ErrorKind::kInternal, {"m"}, [&] {
    file.read_elements(tensor, 1, std::numeric_limits<std::int64_t>::max(), values.data());
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, SafetensorsRectangle,
                         testing::Values(RectangleCase{1, 1}, RectangleCase{1, 17},
                                         RectangleCase{13, 1}, RectangleCase{7, 11},
                                         RectangleCase{1031, 1024}, RectangleCase{3, 60000}));

TEST(Safetensors, ReadsFromManyThreads) {
  const TempFolder folder;
  const std::string header =
      R"({"m":{"dtype":"I32","shape":[1000,100],"data_offsets":[0,400000]}})";
  std::vector<std::int32_t> values(100'000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i);
  std::string contents = length_bytes(header.size()) + header;
  contents.append(reinterpret_cast<const char*>(values.data()), 400'000);
  const SafetensorsFile file(folder.write("m.safetensors", contents));
  std::vector<std::int64_t> wrong(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::int32_t> got(25);
      for (std::int64_t row = 0; row < 1000; ++row) {
        const auto col = static_cast<std::int64_t>(t) * 25;
        file.read_rectangle(file.get("m"), {row, 1, col, 25}, got.data());
        for (std::int64_t c = 0; c < 25; ++c) {
          wrong[t] += got[static_cast<std::size_t>(c)] != row * 100 + col + c;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<std::int64_t>(4, 0));
}

TEST(Safetensors, FileCutWhileOpenIsTransient) {
  const TempFolder folder;
  const auto path =
      folder.write("m.safetensors",
                   file_bytes(R"({"m":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}})", 64));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 10);
  char bytes[64];
  expect_error(ErrorKind::kTransient, {"m.safetensors", "cut while in use"},
               [&] { file.read_bytes(file.get("m"), 0, 64, bytes); });
}

TEST(Safetensors, ReadsARealModel) {
  TESSERA_REQUIRE_DATA(path, "models/stories260K/hf/model.safetensors");
  const SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().size(), 47u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const SafetensorsTensor& embedding = file.get("model.embed_tokens.weight");
  EXPECT_EQ(embedding.shape, (std::vector<std::int64_t>{512, 64}));
  EXPECT_EQ(embedding.dtype, DType::kF32);
}

}  // namespace
}  // namespace tessera
