#include "checkpoint/safetensors_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <numeric>

#include "checkpoint/safetensors_folder.h"
#include "engine/core/error.h"
#include "engine/core/numeric.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using test::expect_error;
using test::read_file;
using test::TempFolder;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// B57 and the header's exact form: every byte of the file.
TEST(SafetensorsWriter, WritesGoldenBytes) {
  const TempFolder folder;
  const auto path = folder / "golden.safetensors";
  SafetensorsWriter writer(path, {{"ones.bf16", DType::kBF16, {2}}, {"one", DType::kF32, {}}});
  const bf16 ones[2] = {bf16(1.0f), bf16(1.0f)};
  const float one = 1.0f;
  writer.write("ones.bf16", ones, sizeof(ones));
  writer.write("one", &one, sizeof(one));
  EXPECT_FALSE(std::filesystem::exists(path)) << "visible before it is complete";
  writer.commit();
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"ones.bf16":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
      R"("one":{"dtype":"F32","shape":[],"data_offsets":[4,8]}})";
  ASSERT_EQ(header.size(), 148u);  // and 4 blanks up to a multiple of 8
  EXPECT_EQ(read_file(path), std::string("\x98\0\0\0\0\0\0\0", 8) + header + "    " +
                                 std::string("\x80\x3f\x80\x3f\x00\x00\x80\x3f", 8));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"golden.safetensors"});
}

TEST(SafetensorsWriter, PadsTheHeaderToTheAlignment) {
  const TempFolder folder;
  for (const std::uint64_t alignment : {1, 8, 512, 4096}) {
    for (const std::size_t length : {1, 2, 3, 4, 5, 6, 7, 8, 9}) {
      const auto path = folder / "a.safetensors";
      const std::string name(length, 'x');
      SafetensorsOptions options;
      options.data_alignment = alignment;
      SafetensorsWriter writer(path, {{name, DType::kU8, {3}}}, options);
      writer.write(name, "abc", 3);
      writer.commit();
      const SafetensorsFile file(path);
      EXPECT_EQ(file.data_start() % alignment, 0u);
      char bytes[3];
      file.read_bytes(file.get(name), 0, 3, bytes);
      EXPECT_EQ(std::string(bytes, 3), "abc");
    }
  }
}

TEST(SafetensorsWriter, PiecesOfAnySizeGiveTheSameFile) {
  const TempFolder folder;
  std::vector<std::int32_t> values(3'000'000);
  std::iota(values.begin(), values.end(), 0);
  const std::size_t bytes = values.size() * 4;
  const auto* data = reinterpret_cast<const char*>(values.data());
  std::string first;
  for (const std::size_t piece : {bytes, std::size_t{1'000'003}, std::size_t{70'001}}) {
    const auto path = folder / "pieces.safetensors";
    SafetensorsWriter writer(path, {{"empty", DType::kF32, {0, 4}},
                                    {"small", DType::kU8, {2}},
                                    {"large", DType::kI32, {1000, 3000}},
                                    {"last", DType::kF64, {0}}});
    writer.write("small", "a", 1);
    writer.write("small", "b", 1);
    for (std::size_t at = 0; at < bytes; at += piece) {
      writer.write("large", data + at, std::min(piece, bytes - at));
    }
    writer.commit();
    if (first.empty()) first = read_file(path);
    EXPECT_EQ(read_file(path), first) << "pieces of " << piece;
  }
  const SafetensorsFile file(folder / "pieces.safetensors");
  std::int32_t got = 0;
  file.read_rectangle(file.get("large"), {999, 1, 2999, 1}, &got);
  EXPECT_EQ(got, 2'999'999);
}

TEST(SafetensorsWriter, WrongOrderOrAmountIsInternal) {
  const TempFolder folder;
  const std::vector<SafetensorsSpec> specs = {{"a", DType::kU8, {2}}, {"b", DType::kU8, {2}}};
  {
    SafetensorsWriter writer(folder / "x.safetensors", specs);
    expect_error(ErrorKind::kInternal, {"got bytes of b", "wanted those of a"},
                 [&] { writer.write("b", "xx", 2); });
    expect_error(ErrorKind::kInternal, {"3 bytes of a"}, [&] { writer.write("a", "xxx", 3); });
    writer.write("a", "xx", 2);
    expect_error(ErrorKind::kInternal, {"2 of 4 bytes"}, [&] { writer.commit(); });
  }
  EXPECT_TRUE(names_in(folder.path()).empty()) << "an abandoned save leaves nothing";
  expect_error(ErrorKind::kInternal, {"twice"}, [&] {
    SafetensorsWriter writer(folder / "x.safetensors",
                             {{"a", DType::kU8, {2}}, {"a", DType::kU8, {2}}});
  });
}

TEST(SafetensorsWriter, AbandonedSaveKeepsTheOldFile) {
  const TempFolder folder;
  const auto path = folder.write("m.safetensors", "old");
  {
    SafetensorsWriter writer(path, {{"a", DType::kU8, {2}}});
    writer.write("a", "x", 1);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names_in(folder.path()).size(), 1u);
}

// A full disk, in a child process whose files may not grow: the error is transient, names the path,
// and the old file stays.
TEST(SafetensorsWriter, FailingWriteIsTransientAndNamesThePath) {
  const TempFolder folder;
  const auto path = folder.write("m.safetensors", "old");
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 16, 1 << 16};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int status = 1;
    try {
      SafetensorsWriter writer(path, {{"a", DType::kU8, {1 << 22}}});
      const std::vector<char> data(1 << 22);
      writer.write("a", data.data(), data.size());
      writer.commit();
    } catch (const Error& error) {
      const bool named = std::string(error.what()).find("m.safetensors") != std::string::npos;
      status = error.kind() == ErrorKind::kTransient && named ? 0 : 2;
    }
    ::_exit(status);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names_in(folder.path()).size(), 1u);
}

TEST(SafetensorsWriter, UnwritablePlaceIsTransient) {
  expect_error(ErrorKind::kTransient, {"/proc/", "x.safetensors"}, [] {
    SafetensorsWriter writer("/proc/x.safetensors", {{"a", DType::kU8, {2}}});
  });
  const TempFolder folder;
  expect_error(ErrorKind::kTransient, {"missing"}, [&] {
    SafetensorsWriter writer(folder / "missing/x.safetensors", {{"a", DType::kU8, {2}}});
  });
}

// Reading a real model and writing it again gives the same bytes.
TEST(SafetensorsWriter, RoundTripOfARealModelIsByteEqual) {
  TESSERA_REQUIRE_DATA(path, "models/stories260K/hf/model.safetensors");
  const TempFolder folder;
  const SafetensorsFile file(path);
  std::vector<SafetensorsSpec> specs;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    specs.push_back({tensor.name, *tensor.dtype, tensor.shape});
  }
  SafetensorsWriter writer(folder / "copy.safetensors", specs);
  for (const SafetensorsTensor& tensor : file.tensors()) {
    std::vector<char> bytes(tensor.bytes());
    file.read_bytes(tensor, 0, bytes.size(), bytes.data());
    writer.write(tensor.name, bytes.data(), bytes.size());
  }
  writer.commit();
  EXPECT_EQ(read_file(folder / "copy.safetensors"), read_file(path));
}

}  // namespace
}  // namespace tessera
