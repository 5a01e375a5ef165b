#include "engine/core/config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>

#include "engine/core/error.h"

namespace tessera {
namespace {

struct Source {
  std::string path;
  double weight = 1.0;
  std::map<std::string, std::string> columns;

  void visit(FieldVisitor& v) {
    v.field("path", path, "File", {.is_path = true});
    v.field("weight", weight, "Share", {.above = 0});
    v.field("columns", columns, "Names of the columns");
  }
};

struct Parallel {
  std::int64_t tensor = 1;
  std::optional<bool> sequence_parallel;

  void visit(FieldVisitor& v) {
    v.field("tensor", tensor, "Ranks",
            {.aliases = {"tensor_parallel_size", "tensor_model_parallel_size"},
             .at_least = 1,
             .free_on_resume = true});
    v.field("sequence_parallel", sequence_parallel, "Split activations", {.unset_word = "auto"});
  }
};

struct Optimizer {
  std::string name = "adamw";
  double learning_rate = 1e-4;
  std::vector<double> betas = {0.9, 0.95};
  std::optional<std::int64_t> warmup_steps;
  std::vector<std::string> skip = {"norm"};
  bool fused = true;
  std::optional<double> clip;

  void visit(FieldVisitor& v) {
    v.field("name", name, "Rule", {.choices = {"adamw", "sgd"}, .value_aliases = {{"adamw_torch", "adamw"}}});
    v.field("learning_rate", learning_rate, "Peak", {.aliases = {"lr"}, .above = 0});
    v.field("betas", betas, "Decays", {.at_least = 0, .below = 1});
    v.field("warmup_steps", warmup_steps, "Steps", {.at_least = 0});
    v.field("skip", skip, "Names");
    v.field("fused", fused, "One launch");
    v.field("clip", clip, "Norm");
  }
};

struct Example {
  Parallel parallel;
  Optimizer optimizer;
  std::vector<Source> train;
  std::string dir = "runs";
  std::optional<std::string> cache;
  std::optional<std::string> time_limit;
  std::optional<std::string> memory;

  void visit(FieldVisitor& v) {
    v.section("parallel", parallel, "Layout");
    v.section("optimizer", optimizer, "Optimizer");
    v.list("train", train, "Sources", {.shorthand = "path"});
    v.field("dir", dir, "Folder", {.is_path = true});
    v.field("cache", cache, "Cache");
    v.field("time_limit", time_limit, "Time", {.unit = "duration"});
    v.field("memory", memory, "Memory", {.unit = "size"});
  }
};

VisitFunction visitor_of(Example& example) {
  return [&example](FieldVisitor& v) { example.visit(v); };
}

Example read(std::string_view text, const std::string& name = "run.yaml") {
  Example example;
  read_config(parse_config_text(text, name), visitor_of(example));
  return example;
}

// The message of the user error that `action` throws; "" if it throws none.
template <typename Action>
std::string user_error(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    return error.what();
  }
  return "";
}

std::string message_of(std::string_view text, const std::string& name = "run.yaml") {
  return user_error([&] { read(text, name); });
}

TEST(Config, ReadsEveryType) {
  const Example e = read(R"(
parallel: {tensor: 4, sequence_parallel: no}
optimizer:
  name: sgd
  learning_rate: 1e-3
  betas: [0.8, .99]
  warmup_steps: 1_000
  skip: [a, "b c", 3]
  fused: off
  clip: 2
train:
  - {path: a.txt, weight: 0.5, columns: {text: body}}
  - b.txt
dir: out
cache: "yes"
)");
  EXPECT_EQ(e.parallel.tensor, 4);
  EXPECT_EQ(e.parallel.sequence_parallel, false);
  EXPECT_EQ(e.optimizer.name, "sgd");
  EXPECT_EQ(e.optimizer.learning_rate, 1e-3);
  EXPECT_EQ(e.optimizer.betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_EQ(e.optimizer.warmup_steps, 1000);
  EXPECT_EQ(e.optimizer.skip, (std::vector<std::string>{"a", "b c", "3"}));
  EXPECT_FALSE(e.optimizer.fused);
  EXPECT_EQ(e.optimizer.clip, 2.0);
  ASSERT_EQ(e.train.size(), 2u);
  EXPECT_EQ(e.train[0].columns.at("text"), "body");
  EXPECT_EQ(e.train[1].path, "b.txt");
  EXPECT_EQ(e.train[1].weight, 1.0);
  EXPECT_EQ(e.dir, "out");
  EXPECT_EQ(e.cache, "yes");
}

TEST(Config, EmptyTextAndEmptySectionsKeepDefaults) {
  for (const char* text : {"", "# nothing\n", "---\n", "optimizer:\n", "optimizer: {}\n", "{}", "\n\n\n"}) {
    const Example e = read(text);
    EXPECT_EQ(e.optimizer.learning_rate, 1e-4) << text;
    EXPECT_TRUE(e.train.empty());
  }
}

TEST(Config, NullUnsetsOptionalsAndEmptiesLists) {
  const Example e = read("optimizer: {warmup_steps: null, skip: ~, clip: }\nparallel: {sequence_parallel: auto}\ntrain:\n");
  EXPECT_FALSE(e.optimizer.warmup_steps.has_value());
  EXPECT_FALSE(e.parallel.sequence_parallel.has_value());
  EXPECT_TRUE(e.optimizer.skip.empty());
  EXPECT_TRUE(e.train.empty());
  EXPECT_EQ(message_of("optimizer:\n  learning_rate:\n"),
            "[config] run.yaml:2 optimizer.learning_rate is empty; write a number");
}

TEST(Config, SingleValueStandsForAListOfOne) {
  const Example e = read("optimizer: {skip: bias}\ntrain: data.txt\n");
  EXPECT_EQ(e.optimizer.skip, std::vector<std::string>{"bias"});
  ASSERT_EQ(e.train.size(), 1u);
  EXPECT_EQ(e.train[0].path, "data.txt");
}

TEST(Config, ReportsAllMistakesInFileOrder) {
  EXPECT_EQ(message_of("parallel:\n"
                       "  tensr: 2\n"
                       "  sequence_parallel: maybe\n"
                       "optimizr: {}\n"
                       "optimizer:\n"
                       "  lr: 0\n"
                       "  betas: [0.9, 1.5]\n"
                       "  name: adam\n"
                       "  warmup_steps: 2.5\n"
                       "  warmup_steps: 3\n"
                       "train:\n"
                       "  - path: [a]\n"
                       "    wieght: 1\n"
                       "  - [b]\n"),
            "[config] run.yaml:2 parallel.tensr is not a key of parallel; did you mean parallel.tensor?\n"
            "[config] run.yaml:3 parallel.sequence_parallel is maybe; write true, false or auto\n"
            "[config] run.yaml:4 optimizr is not a section of the configuration; did you mean optimizer?\n"
            "[config] run.yaml:6 optimizer.learning_rate is 0; it must be above 0\n"
            "[config] run.yaml:7 optimizer.betas has an item (number 2) that is 1.5; it must be at least 0 "
            "and below 1\n"
            "[config] run.yaml:8 optimizer.name is adam; write adamw or sgd (did you mean adamw?)\n"
            "[config] run.yaml:9 optimizer.warmup_steps is 2.5; write a whole number\n"
            "[config] run.yaml:10 optimizer.warmup_steps is given twice, first at run.yaml:9; keep one\n"
            "[config] run.yaml:12 train[0].path is a list; write text\n"
            "[config] run.yaml:13 train[0].wieght is not a key of train[0]; did you mean train[0].weight?\n"
            "[config] run.yaml:14 train[1] is a list; write a map of its keys, or just its path");
}

TEST(Config, MisplacedKeysAreShownTheirSection) {
  EXPECT_EQ(message_of("learning_rate: 1e-4\n"),
            "[config] run.yaml:1 learning_rate is not a section of the configuration; did you mean "
            "optimizer.learning_rate?");
  EXPECT_EQ(message_of("parallel: {lr: 1}\n"),
            "[config] run.yaml:1 parallel.lr is not a key of parallel; did you mean optimizer.learning_rate?");
  EXPECT_EQ(message_of("parallel.tensor: 2\n"),
            "[config] run.yaml:1 parallel.tensor is not a section of the configuration; write tensor under "
            "parallel:, indented");
  EXPECT_EQ(message_of("zebra: 1\n"),
            "[config] run.yaml:1 zebra is not a section of the configuration; its sections are parallel, "
            "optimizer, train, dir, cache, time_limit, memory");
}

TEST(Config, AliasesAreTranslatedAndNoted) {
  Example e;
  const ConfigReading reading = read_config(
      parse_config_text("optimizer:\n  lr: 2e-4\n  name: adamw_torch\n", "run.yaml"), visitor_of(e));
  EXPECT_EQ(e.optimizer.learning_rate, 2e-4);
  EXPECT_EQ(e.optimizer.name, "adamw");
  EXPECT_EQ(reading.notes, std::vector<std::string>{"run.yaml:2 optimizer.lr is read as optimizer.learning_rate"});
  EXPECT_EQ(reading.places.at("optimizer.learning_rate").where, "run.yaml:2");
  EXPECT_FALSE(reading.places.contains("optimizer.betas"));
}

TEST(Config, TwoNamesOfOneKeyAreAMistakeNamingBothLines) {
  EXPECT_EQ(message_of("optimizer:\n  learning_rate: 1e-4\n\n  lr: 1e-4\n"),
            "[config] run.yaml:4 optimizer.lr and optimizer.learning_rate (run.yaml:2) are two names of one "
            "key; keep optimizer.learning_rate");
}

TEST(Config, DoubledKeysAreMistakesEverywhere) {
  EXPECT_EQ(message_of("parallel: {tensor: 1}\nparallel: {tensor: 2}\n"),
            "[config] run.yaml:2 parallel is given twice, first at run.yaml:1; keep one");
  EXPECT_EQ(message_of("{\"dir\": \"a\",\n \"dir\": \"a\"}", "run.json"),
            "[config] run.json:2 dir is given twice, first at run.json:1; keep one");
  EXPECT_EQ(message_of("train:\n  - path: a\n    path: b\n"),
            "[config] run.yaml:3 train[0].path is given twice, first at run.yaml:2; keep one");
  EXPECT_EQ(message_of("train:\n  - columns: {a: b, a: c}\n"),
            "[config] run.yaml:2 train[0].columns holds a twice; keep one");
}

TEST(Config, RefusedKeysSayWhy) {
  Example e;
  const std::map<std::string, std::string> refused = {
      {"adapter", "is not available in this version"}, {"train[].labels", "is not available yet"}};
  const ConfigNode root = parse_config_text("adapter: {rank: 4}\ntrain:\n  - {path: x, labels: y}\n", "run.yaml");
  EXPECT_EQ(user_error([&] { read_config(root, visitor_of(e), refused); }),
            "[config] run.yaml:1 adapter is not available in this version\n"
            "[config] run.yaml:3 train[0].labels is not available yet");
}

TEST(Config, UnreadableNamesAreKnownToLaterChecks) {
  Example e;
  const ConfigReading reading = collect_config(
      parse_config_text("optimizer: {warmup_stesp: 3, clip: x}\n", "run.yaml"), visitor_of(e));
  EXPECT_EQ(reading.mistakes.size(), 2u);
  EXPECT_EQ(reading.unreadable, (std::set<std::string>{"optimizer.clip", "optimizer.warmup_steps"}));
}

TEST(Config, WrongTypesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"optimizer: {learning_rate: fast}", "optimizer.learning_rate is fast; write a number"},
      {"optimizer: {learning_rate: '1e-4'}",
       "optimizer.learning_rate is the text \"1e-4\"; write a number, without quotes"},
      {"optimizer: {learning_rate: .inf}", "optimizer.learning_rate is .inf; write a number"},
      {"optimizer: {learning_rate: .nan}", "optimizer.learning_rate is .nan; write a number"},
      {"optimizer: {learning_rate: 1e999}", "optimizer.learning_rate is 1e999; write a number"},
      {"optimizer: {learning_rate: 1e-4x}", "optimizer.learning_rate is 1e-4x; write a number"},
      {"optimizer: {learning_rate: [1]}", "optimizer.learning_rate is a list; write a number"},
      {"optimizer: {warmup_steps: 10k}", "optimizer.warmup_steps is 10k; write a whole number"},
      {"optimizer: {warmup_steps: 0x10}", "optimizer.warmup_steps is 0x10; write a whole number"},
      {"optimizer: {warmup_steps: 010}", "optimizer.warmup_steps is 010; write a whole number"},
      {"optimizer: {warmup_steps: 99999999999999999999}",
       "optimizer.warmup_steps is 99999999999999999999; write a whole number"},
      {"optimizer: {warmup_steps: -1}", "optimizer.warmup_steps is -1; it must be at least 0"},
      {"optimizer: {warmup_steps: true}", "optimizer.warmup_steps is true; write a whole number"},
      {"optimizer: {fused: 1}", "optimizer.fused is 1; write true, false"},
      {"optimizer: {fused: 'true'}", "optimizer.fused is the text \"true\"; write true, false"},
      {"optimizer: {fused: tRUE}", "optimizer.fused is tRUE; write true, false"},
      {"optimizer: {betas: {a: 1}}", "optimizer.betas is a map; write a list, [a, b]"},
      {"optimizer: {betas: [0.9, x]}", "optimizer.betas has an item (number 2) that is x; write a number"},
      {"optimizer: {betas: [0.9, ]}", ""},
      {"optimizer: {name: [adamw]}", "optimizer.name is a list; write adamw or sgd"},
      {"optimizer: 3", "optimizer is 3; it is a section: write its keys under it, indented"},
      {"optimizer: [a]", "optimizer is a list; it is a section: write its keys under it, indented"},
      {"dir: {a: 1}", "dir is a map; write text, in quotes if it holds \": \" or begins with { or ["},
      {"train: [{columns: [a]}]", "train[0].columns is a list; write a map, {name: value}"},
      {"train: [{columns: {a: [b]}}]", "train[0].columns has an entry a that is a list; write text"},
      {"time_limit: soon", "time_limit is soon; write a duration such as 90s, 10m, 1h30m or 01:30:00"},
      {"time_limit: 1h30m", ""},
      {"time_limit: 3600", ""},
      {"memory: 40X", "memory is 40X; write a size such as 512MiB or 40GiB"},
      {"memory: 40GiB", ""},
      {"train: [null]", "train[0] is empty; write a map of its keys, or just its path"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string want = *expected ? std::string("[config] run.yaml:1 ") + expected : "";
    EXPECT_EQ(message_of(text), want) << text;
  }
}

TEST(Config, LongAndBinaryValuesAreShortenedInMessages) {
  EXPECT_EQ(message_of("optimizer: {fused: " + std::string(500, 'x') + "}"),
            "[config] run.yaml:1 optimizer.fused is " + std::string(60, 'x') + "...; write true, false");
  EXPECT_EQ(message_of("optimizer: {fused: \"a\\nb\\tc\"}"),
            "[config] run.yaml:1 optimizer.fused is the text \"a b c\"; write true, false");
}

// "run.yaml:3:7 is" -> "run.yaml:3:# is": versions of yaml-cpp differ in the column they blame.
std::string without_column(const std::string& message) {
  return std::regex_replace(message, std::regex(R"((run\.yaml:\d+):\d+ is)"), "$1:# is");
}

TEST(Config, MalformedYamlNamesFileLineAndColumn) {
  const std::pair<std::string, const char*> cases[] = {
      {"a: b: c\n", "run.yaml:1:5 is not valid YAML: no value can begin with this \":\"; check the "
                    "indentation, and put a value that holds \": \" in quotes"},
      {"dir: [1, 2\n", "run.yaml:3:1 is not valid YAML: a list opened with [ is not closed with ]"},
      {"dir: {a: 1\n", "run.yaml:3:1 is not valid YAML: a map opened with { is not closed with }"},
      {"dir: 'abc\nb: 2\n", "run.yaml:4:2 is not valid YAML: a quote that was opened is never closed"},
      {"dir: \"abc\n", "run.yaml:3:2 is not valid YAML: a quote that was opened is never closed"},
      {"dir: 1\nb\n", "run.yaml:2:1 is not valid YAML: this is not a \"key: value\" of the section above it"},
      {"dir: 1\n- b\n", "run.yaml:2:1 is not valid YAML: this is not a \"key: value\" of the section above it"},
      {"dir: @x\n", "run.yaml:1:6 is not valid YAML: no value can begin with this character; put it in quotes"},
      {"dir: \"\\q\"\n", "run.yaml:1:9 is not valid YAML: unknown escape character: q"},
      {"dir: *nope\n", "run.yaml:1:6 is not valid YAML: the referenced anchor is not defined"},
      {"a: 1\n\tb: 2\n", "run.yaml:2:1 is not valid YAML: illegal tab when looking for indentation; indent "
                        "with spaces, YAML allows no tabs there"},
      {"dir: \"\\N\"\n", "run.yaml:1 has the escape \\N or \\_; write \\u0085 or \\u00a0"},
      {"dir: !secret x\n", "run.yaml:1 has the tag !secret, which has no meaning here; leave it out"},
      {"dir: !!binary aGk=\n",
       "run.yaml:1 has the tag tag:yaml.org,2002:binary, which has no meaning here; leave it out"},
      {"? [a]\n: b\n", "run.yaml:1 has a list or a map where a key belongs, or a bracket that is never "
                       "closed; a value that begins with { or [ and is text needs quotes"},
      {"dir: {{name}}\n", "run.yaml:1 has a list or a map where a key belongs"},
      {": b\n", "run.yaml:1 has an empty key; a key is plain text"},
      {"dir: &x [*x]\n", "run.yaml:1 has an alias inside the value it stands for"},
      {"<<: 3\n", "run.yaml:1 merges (<<) something that is not a map; write <<: *name of an anchored map"},
      {"dir: a\n---\ndir: b\n", "run.yaml:3 begins a second document; a file holds one"},
      {"- a\ndir: b\n", "run.yaml:2 begins a second document; a file holds one"},
      {std::string("dir: x\nca\0che: y\n", 16), "run.yaml:2 holds a NUL byte; a configuration is text"},
      {"dir: \xC3\x28\n", "run.yaml:1 holds the byte 0xc3, which is not UTF-8; save the file as UTF-8"},
      {"\xFF\xFE" "d", "run.yaml is UTF-16; save it as UTF-8"},
      {"just text", "run.yaml:1 is just text at the top level; a configuration is a map of sections"},
      {"dir:x", "run.yaml:1 is dir:x at the top level; a configuration is a map of sections. A space "
                "belongs behind the colon"},
      {"[a, b]", "run.yaml:1 is a list at the top level; a configuration is a map of sections"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string got = without_column(message_of(text));
    const std::string want = without_column(std::string("[config] ") + expected);
    EXPECT_EQ(got.substr(0, want.size()), want) << text;
  }
}

TEST(Config, TabIndentationIsNamed) {
  for (const char* text : {"parallel:\n\ttensor: 2\n", "parallel:\n  tensor: 2\n\tsequence_parallel: auto\n"}) {
    EXPECT_NE(message_of(text).find("indent with spaces, YAML allows no tabs there"), std::string::npos) << text;
  }
}

TEST(Config, MalformedJsonNamesFileLineAndColumn) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"dir\": \"a\",}", "run.json:1:13 is not valid JSON: syntax error while parsing object key"},
      {"{dir: \"a\"}", "run.json:1:2 is not valid JSON: syntax error while parsing object key"},
      {"{\n\"dir\": a}", "run.json:2:8 is not valid JSON: syntax error while parsing value"},
      {"{\"dir\": 01}", "run.json:1:10 is not valid JSON"},
      {"{\"dir\": NaN}", "run.json:1:9 is not valid JSON"},
      {"{\"dir\": 'a'}", "run.json:1:9 is not valid JSON"},
      {"{\"dir\": \"a\"} x", "run.json:1:14 is not valid JSON"},
      {"{\"dir\": \"a\"\n\n", "run.json:3:1 is not valid JSON: syntax error while parsing object"},
      {"// note\n{}", "run.json:1:1 is not valid JSON"},
      {"dir: a", "run.json:1:1 is not valid JSON"},
      {"", "run.json:1:1 is not valid JSON"},
      {"{\"dir\": \"\\ud83d\"}", "run.json:1:16 is not valid JSON"},
      {"{\n\"optimizer\": {\"clip\": 1e400}}", "run.json:2 is not valid JSON: number overflow parsing '1e400'"},
      {"[1]", "run.json:1 is a list at the top level; a configuration is a map of sections"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string got = message_of(text, "run.json");
    EXPECT_EQ(got.substr(0, 9 + std::string(expected).size()), std::string("[config] ") + expected) << text;
  }
}

TEST(Config, JsonAndYamlReadAlikeAndKeepLines) {
  const char* text = "{\"parallel\": {\"tensor\": 2\n},\n \"optimizer\": {\n  \"betas\": [0.5,\n 0.25],\n"
                     "  \"clip\": 1e1, \"fused\": false, \"warmup_steps\": null},\n"
                     " \"train\": [{\"path\": \"\\u00e9\\ud83d\\ude00/\\\"x\\\"\"}]}";
  for (const char* name : {"a.json", "b.json"}) {
    const Example e = read(text, name);
    EXPECT_EQ(e.parallel.tensor, 2);
    EXPECT_EQ(e.optimizer.betas, (std::vector<double>{0.5, 0.25}));
    EXPECT_EQ(e.optimizer.clip, 10.0);
    EXPECT_FALSE(e.optimizer.fused);
    EXPECT_EQ(e.train[0].path, "\xC3\xA9\xF0\x9F\x98\x80/\"x\"");
  }
  EXPECT_EQ(message_of("{\"parallel\": {\n  \"tensor\": 0\n},\n\"optimizer\": {\"clip\":\n\"x\"}}", "a.json"),
            "[config] a.json:2 parallel.tensor is 0; it must be at least 1\n"
            "[config] a.json:4 optimizer.clip is the text \"x\"; write a number");
}

TEST(Config, ByteOrderMarkAndWindowsLineEndsAreHarmless) {
  const Example e = read("\xEF\xBB\xBFparallel:\r\n  tensor: 2\r\ndir: out\r\n");
  EXPECT_EQ(e.parallel.tensor, 2);
  EXPECT_EQ(e.dir, "out");
  EXPECT_EQ(read("\xEF\xBB\xBF{\"dir\": \"x\"}", "a.json").dir, "x");
  EXPECT_EQ(message_of("parallel:\r\n  tensor: x\r\n"),
            "[config] run.yaml:2 parallel.tensor is x; write a whole number");
}

TEST(Config, AnchorsAliasesAndMergeKeys) {
  const Example e = read(
      "dir: &d out\n"
      "train:\n"
      "  - &first {path: *d, weight: 2}\n"
      "  - <<: *first\n"
      "    path: other\n"
      "  - {<<: [{weight: 3}, *first], columns: {a: b}}\n");
  ASSERT_EQ(e.train.size(), 3u);
  EXPECT_EQ(e.train[0].path, "out");
  EXPECT_EQ(e.train[1].path, "other");
  EXPECT_EQ(e.train[1].weight, 2);
  EXPECT_EQ(e.train[2].weight, 3);
  EXPECT_EQ(e.train[2].path, "out");
  EXPECT_EQ(e.train[2].columns.at("a"), "b");
}

TEST(Config, NestingAndSizeAreBounded) {
  auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(message_of("dir: " + nested(100)), "[config] run.yaml:1 is nested deeper than 64 levels");
  EXPECT_EQ(message_of("{\"dir\": " + nested(100) + "}", "a.json"),
            "[config] a.json:1 is nested deeper than 64 levels");
  EXPECT_NE(message_of("dir: " + nested(100'000)), "");
  EXPECT_NE(message_of("{\"dir\": " + std::string(100'000, '[') + "}", "a.json"), "");
  // Ten times ten to the eighth values in a kilobyte.
  std::string bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n";
  for (int i = 1; i < 9; ++i) {
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int k = 0; k < 10; ++k) bomb += (k ? ",*a" : "*a") + std::to_string(i - 1);
    bomb += "]\n";
  }
  EXPECT_NE(message_of(bomb).find("holds more than 200000 values"), std::string::npos);
  EXPECT_EQ(message_of(std::string((16 << 20) + 1, '#')),
            "[config] run.yaml has 16777217 bytes; a configuration is at most 16777216. Is it the right file?");
}

TEST(Config, FilesThatCannotBeReadAreUserErrors) {
  const auto folder = std::filesystem::temp_directory_path();
  EXPECT_EQ(user_error([&] { parse_config_file(folder.string()); }),
            "[config] " + folder.string() + " is a folder; name a YAML or JSON file");
  EXPECT_EQ(user_error([] { parse_config_file("no/such/run.yaml"); }),
            "[config] no/such/run.yaml cannot be read: No such file or directory");
  EXPECT_NE(user_error([] { parse_config_file("/dev/zero"); }), "");
}

TEST(Config, ReadsFiles) {
  const auto path = std::filesystem::temp_directory_path() / "tessera_config_test.yaml";
  std::ofstream(path) << "dir: here\n";
  Example e;
  const ConfigReading reading = read_config(parse_config_file(path.string()), visitor_of(e));
  std::filesystem::remove(path);
  EXPECT_EQ(e.dir, "here");
  EXPECT_EQ(reading.places.at("dir").where, path.string() + ":1");
}

TEST(Config, PathsExpandHomeAndVariables) {
  setenv("HOME", "/home/someone", 1);
  setenv("TESSERA_TEST_SCRATCH", "/scratch", 1);
  unsetenv("TESSERA_TEST_UNSET");
  EXPECT_EQ(read("dir: ~/runs").dir, "/home/someone/runs");
  EXPECT_EQ(read("dir: \"~\"").dir, "/home/someone");
  EXPECT_EQ(read("dir: ${TESSERA_TEST_SCRATCH}/a/${TESSERA_TEST_SCRATCH}").dir, "/scratch/a//scratch");
  EXPECT_EQ(read("dir: a~b/$x").dir, "a~b/$x");
  EXPECT_EQ(read("cache: ~/x").cache, "~/x");  // not a path
  EXPECT_EQ(message_of("dir: ${TESSERA_TEST_UNSET}/a"),
            "[config] run.yaml:1 dir is ${TESSERA_TEST_UNSET}/a: the environment variable "
            "TESSERA_TEST_UNSET is not set");
  EXPECT_EQ(message_of("dir: ~root/a"), "[config] run.yaml:1 dir is ~root/a: ~ stands for your own home "
                                        "folder only; write the other folder in full");
  EXPECT_EQ(message_of("dir: a${b"), "[config] run.yaml:1 dir is a${b: ${ has no closing }");
  EXPECT_EQ(message_of("dir: '${a-b}'"),
            "[config] run.yaml:1 dir is the text \"${a-b}\": ${a-b} is not the name of an environment variable");
}

TEST(ConfigOverride, ReplacesAndAdds) {
  ConfigNode root = parse_config_text("optimizer:\n  lr: 1e-4\ntrain: [{path: a}, {path: b}]\n", "run.yaml");
  apply_override(root, "optimizer.learning_rate=3e-4");  // beats the alias in the file
  apply_override(root, "optimizer.betas=[0.5,0.6]");
  apply_override(root, "parallel.tensor = 2");
  apply_override(root, "train.1.weight=4");
  apply_override(root, "parallel.tensor=8");
  apply_override(root, "cache=");
  Example e;
  const ConfigReading reading = read_config(root, visitor_of(e));
  EXPECT_EQ(e.optimizer.learning_rate, 3e-4);
  EXPECT_EQ(e.optimizer.betas, (std::vector<double>{0.5, 0.6}));
  EXPECT_EQ(e.parallel.tensor, 8);
  EXPECT_EQ(e.train[1].weight, 4);
  EXPECT_EQ(e.train[0].weight, 1);
  EXPECT_EQ(reading.places.at("parallel.tensor").where, "--set");
}

TEST(ConfigOverride, LaterAliasBeatsEarlierName) {
  ConfigNode root;
  apply_override(root, "optimizer.learning_rate=1");
  apply_override(root, "optimizer.lr=2");
  Example e;
  read_config(root, visitor_of(e));
  EXPECT_EQ(e.optimizer.learning_rate, 2);
}

TEST(ConfigOverride, KeepsTheFilesOwnMistakes) {
  ConfigNode root = parse_config_text("dir: a\ndir: b\nparallel: {tensor: x}\n", "run.yaml");
  apply_override(root, "parallel.tensr=2");
  Example e;
  EXPECT_EQ(user_error([&] { read_config(root, visitor_of(e)); }),
            "[config] run.yaml:2 dir is given twice, first at run.yaml:1; keep one\n"
            "[config] run.yaml:3 parallel.tensor is x; write a whole number\n"
            "[config] --set parallel.tensr is not a key of parallel; did you mean parallel.tensor?");
}

TEST(ConfigOverride, RefusesMalformedAssignments) {
  auto message = [](const char* assignment) {
    ConfigNode root = parse_config_text("dir: a\ntrain: [x]\n", "run.yaml");
    return user_error([&] { apply_override(root, assignment); });
  };
  EXPECT_EQ(message("novalue"), "[config] --set novalue is not of the form section.key=value");
  EXPECT_EQ(message("=3"), "[config] --set =3 is not of the form section.key=value");
  EXPECT_EQ(message("a..b=3"), "[config] --set a..b=3 is not of the form section.key=value");
  EXPECT_EQ(message("dir.x=3"), "[config] --set dir.x: dir is the value a, not a section");
  EXPECT_EQ(message("train.1.path=y"),
            "[config] --set train.1.path: train is a list of 1; 1 is not the number of one of its items "
            "(the first is 0)");
  EXPECT_NE(message("dir=[1").find("a bracket that is never closed"), std::string::npos);
}

TEST(ConfigWrite, CanonicalTextReadsBackToTheSameValues) {
  Example e = read("optimizer: {lr: 2.5e-5, warmup_steps: 7, skip: []}\nparallel: {tensor: 2}\n"
                   "train: [{path: a, columns: {x: 'y: z', 'a,b': c}}, b]\n");
  const std::string text = write_config(visitor_of(e));
  EXPECT_EQ(text,
            "parallel:\n"
            "  tensor: 2\n"
            "  sequence_parallel: auto\n"
            "optimizer:\n"
            "  name: adamw\n"
            "  learning_rate: 2.5e-5\n"
            "  betas: [0.9, 0.95]\n"
            "  warmup_steps: 7\n"
            "  skip: []\n"
            "  fused: true\n"
            "train:\n"
            "  - path: a\n"
            "    weight: 1.0\n"
            "    columns: {\"a,b\": c, x: \"y: z\"}\n"
            "  - path: b\n"
            "    weight: 1.0\n"
            "    columns: {}\n"
            "dir: runs\n");
  Example again = read(text);
  EXPECT_EQ(write_config(visitor_of(again)), text);
}

TEST(ConfigWrite, AwkwardStringsSurvive) {
  const std::string awkward[] = {
      "", " ", "a ", " a", "true", "No", "off", "null", "~", "1", "1e5", "-3", ".5", "0x1f", "1:30", "y",
      "a: b", "a:", ":a", "a #b", "#a", "- a", "-", "[a]", "{a}", "a]b", "a, b", "*a", "&a", "!a", "|", ">",
      "'", "\"", "a\"b", "it's", "\\", "a\\nb", "a\nb", "\n", "a\tb", "\t", "\r", "a\r\n", "%a", "@a", "`a",
      "=", "<<", "?", "? a", "\x01\x7f", "\xC3\xA9", "\xC2\x85", "\xC2\xA0", "\xE2\x80\xA8", "\xE2\x80\xA9x",
      "\xEF\xBB\xBFx", "\xF0\x9F\x98\x80", "---", "...", "--- a", "null ", "C:\\dir", "a=b", "x#y", "NaN", ".inf"};
  for (const std::string& value : awkward) {
    Example e;
    e.cache = value;
    e.optimizer.skip = {value, "x", value};
    Source source;
    source.columns[value] = value;
    e.train.push_back(source);
    const std::string text = write_config(visitor_of(e));
    Example again;
    const std::string problem =
        user_error([&] { read_config(parse_config_text(text, "run.yaml"), visitor_of(again)); });
    EXPECT_EQ(problem, "") << text;
    EXPECT_EQ(again.cache, value) << text;
    EXPECT_EQ(again.optimizer.skip, e.optimizer.skip) << text;
    ASSERT_EQ(again.train.size(), 1u);
    EXPECT_EQ(again.train[0].columns, source.columns) << text;
  }
}

TEST(ConfigWrite, NumbersAreShortAndExact) {
  for (const double value : {1e-4, 0.1, 1.0, 3.0, 1e6, 123456.0, 1e-8, 2.5e-5, 1.0 / 3, 5e-324, 1.7976931348623157e308}) {
    Example e;
    e.optimizer.learning_rate = value;
    const std::string text = write_config(visitor_of(e));
    EXPECT_EQ(read(text).optimizer.learning_rate, value) << text;
  }
}

TEST(ConfigWrite, HelpIsCommentsAndUnsetKeysAreCommentedOut) {
  Example e;
  const std::string text = write_config(visitor_of(e), true);
  EXPECT_NE(text.find("  # warmup_steps:             # Steps\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  tensor: 1                   # Ranks\n"), std::string::npos) << text;
  EXPECT_NE(text.find("# Rule (adamw | sgd)\n"), std::string::npos) << text;
  Example again = read(text);
  EXPECT_EQ(write_config(visitor_of(again)), write_config(visitor_of(e)));
}

TEST(ConfigWrite, HelpOfTheFirstListItemStandsBesideItsKeys) {
  Example e = read("train: [{path: a, weight: 2}, b]\n");
  const std::string text = write_config(visitor_of(e), true);
  EXPECT_NE(text.find("train:                        # Sources\n"
                      "  - path: a                   # File\n"
                      "    weight: 2.0               # Share\n"
                      "    columns: {}               # Names of the columns\n"
                      "  - path: b\n"
                      "    weight: 1.0\n"
                      "    columns: {}\n"),
            std::string::npos)
      << text;
  Example again = read(text);
  EXPECT_EQ(write_config(visitor_of(again)), write_config(visitor_of(e)));
}

TEST(ConfigList, ListsFieldsWithValuesAndDescribesListsByOneItem) {
  Example e = read("train: [a, b]\n");
  std::vector<std::string> names;
  for (const FieldRecord& record : list_fields(visitor_of(e))) names.push_back(record.name + "=" + record.value);
  const std::vector<std::string> expected = {
      "parallel.tensor=1", "parallel.sequence_parallel=auto", "optimizer.name=adamw",
      "optimizer.learning_rate=1e-4", "optimizer.betas=[0.9, 0.95]", "optimizer.warmup_steps=",
      "optimizer.skip=[norm]", "optimizer.fused=true", "optimizer.clip=", "train[0].path=a",
      "train[0].weight=1.0", "train[0].columns={}", "train[1].path=b", "train[1].weight=1.0",
      "train[1].columns={}", "dir=runs", "cache=", "time_limit=", "memory="};
  EXPECT_EQ(names, expected);

  Example empty;
  std::map<std::string, std::string> types;
  for (const FieldRecord& record : describe_fields(visitor_of(empty))) types[record.name] = record.type;
  EXPECT_EQ(types.at("train"), "list");
  EXPECT_EQ(types.at("train[].weight"), "number");
  EXPECT_EQ(types.at("optimizer.warmup_steps"), "integer");
  EXPECT_EQ(types.at("optimizer"), "section");
  EXPECT_TRUE(empty.train.empty());
}

}  // namespace
}  // namespace tessera
