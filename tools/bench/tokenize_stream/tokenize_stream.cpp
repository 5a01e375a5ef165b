// Encodes texts from standard input for tools/bench/fuzz_tokenizers.py, which compares the ids with
// the reference library and times both.
//
//   tokenize_stream encode TOKENIZER [--special] [--spans] [--decode]
//   tokenize_stream time TOKENIZER THREADS REPEATS
//
// Standard input: for each text its length in bytes (u32, little-endian) and its bytes.
// encode writes for each text: the number of tokens, the ids, with --spans begin and end of each,
// with --decode the length and bytes of the decoded text (all u32). time prints one JSON object.
#include <time.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/tokenizer.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

std::vector<std::string> read_texts() {
  std::vector<std::string> texts;
  std::uint32_t length = 0;
  while (std::fread(&length, sizeof length, 1, stdin) == 1) {
    std::string text(length, '\0');
    CHECK_USER(std::fread(text.data(), 1, length, stdin) == length, "the input ends within a text");
    texts.push_back(std::move(text));
  }
  return texts;
}

void put(std::string& out, std::uint32_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

int encode(const Tokenizer& tokenizer, const std::vector<std::string>& flags) {
  EncodeOptions options{.add_special_tokens = false};
  bool writes_spans = false;
  bool writes_text = false;
  for (const std::string& flag : flags) {
    if (flag == "--special") {
      options.add_special_tokens = true;
    } else if (flag == "--spans") {
      writes_spans = true;
    } else if (flag == "--decode") {
      writes_text = true;
    } else {
      TESSERA_FAIL(ErrorKind::kUser, "unknown option {}", flag);
    }
  }
  std::string out;
  for (const std::string& text : read_texts()) {
    Encoding encoding;
    if (writes_spans) {
      encoding = tokenizer.encode_with_spans(text, options);
    } else {
      tokenizer.encode_append(text, options, encoding.ids);
    }
    put(out, static_cast<std::uint32_t>(encoding.ids.size()));
    for (const std::int32_t id : encoding.ids) put(out, static_cast<std::uint32_t>(id));
    for (const TextSpan& span : encoding.spans) {
      put(out, span.begin);
      put(out, span.end);
    }
    if (writes_text) {
      const std::string decoded = tokenizer.decode(encoding.ids, false);
      put(out, static_cast<std::uint32_t>(decoded.size()));
      out += decoded;
    }
  }
  std::fwrite(out.data(), 1, out.size(), stdout);
  return 0;
}

int time(const Tokenizer& tokenizer, int threads, int repeats) {
  const std::vector<std::string> texts = read_texts();
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  const EncodeOptions options{.add_special_tokens = false};
  const auto cpu_seconds = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  };
  double best = 0;
  double best_cpu = 0;
  double first_cpu = 0;  // of the pass that has seen none of the words
  std::size_t tokens = 0;
  for (int i = 0; i < repeats; ++i) {
    const double cpu_start = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    const auto ids = tokenizer.encode_batch(views, options, threads);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const double cpu = cpu_seconds() - cpu_start;
    if (i == 0 || seconds.count() < best) best = seconds.count();
    if (i == 0 || cpu < best_cpu) best_cpu = cpu;
    if (i == 0) first_cpu = cpu;
    tokens = 0;
    for (const auto& text : ids) tokens += text.size();
  }
  std::printf(
      "{\"seconds\": %.6f, \"cpu_seconds\": %.6f, \"first_cpu_seconds\": %.6f, \"tokens\": %zu}\n",
      best, best_cpu, first_cpu, tokens);
  return 0;
}

int run(const std::vector<std::string>& args) {
  CHECK_USER(args.size() >= 2, "usage: tokenize_stream encode|time TOKENIZER ...");
  const Tokenizer tokenizer = args[1] == "bytes" ? Tokenizer::bytes() : Tokenizer::load(args[1]);
  if (args[0] == "encode") return encode(tokenizer, {args.begin() + 2, args.end()});
  CHECK_USER(args[0] == "time" && args.size() == 4,
             "usage: tokenize_stream time TOKENIZER THREADS REPEATS");
  return time(tokenizer, std::atoi(args[2].c_str()), std::atoi(args[3].c_str()));
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run({argv + 1, argv + argc});
  } catch (const tessera::Error& error) {
    std::cerr << error.what() << '\n';
    return tessera::exit_code(error.kind());
  }
}
