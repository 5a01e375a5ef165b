// `tessera doctor` as a user runs it, with and without a GPU.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"

namespace tessera::test {
namespace {

TEST(Doctor, JsonNamesEveryCheckAndTheExitCodeFollows) {
  const Ended ended = run_tessera("doctor --json");
  const nlohmann::json json = nlohmann::json::parse(ended.output);
  bool good = true;
  std::string names;
  for (const nlohmann::json& check : json.at("checks")) {
    names += check.at("name").get<std::string>() + ";";
    EXPECT_FALSE(check.at("found").get<std::string>().empty());
    EXPECT_EQ(check.at("ok").get<bool>(), check.at("advice").get<std::string>().empty());
    good = good && check.at("ok").get<bool>();
  }
  for (const char* name : {"gpu", "host memory;", "cores;", "/dev/shm;", "open files;", "disk;",
                           "disk write;", "mpi;"}) {
    EXPECT_NE(names.find(name), std::string::npos) << name << " in " << names;
  }
  EXPECT_EQ(json.at("ok").get<bool>(), good);
  EXPECT_EQ(ended.code, good ? 0 : 1);
}

TEST(Doctor, WarnsOfAFewOpenFilesAndSaysWhatToChange) {
  const Ended ended = run_tessera("doctor", "sh -c 'ulimit -n 64; exec \"$0\" \"$@\"'");
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("WARN  open files     64: ulimit -n 4096"), std::string::npos)
      << ended.output;
}

TEST(Doctor, NamesAnMpiModuleThatCannotBeLoaded) {
  TempFolder folder;
  folder.write("module.so", "not a library");
  const Ended ended =
      run_tessera("doctor", "env TESSERA_MPI_MODULE=" + (folder / "module.so").string());
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("WARN  mpi"), std::string::npos) << ended.output;
}

TEST(Doctor, RefusesUnknownOptions) { EXPECT_EQ(run_tessera("doctor --fast").code, 2); }

}  // namespace
}  // namespace tessera::test
