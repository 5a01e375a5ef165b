#include "parallel/launch_environment.h"

#include <gtest/gtest.h>

#include <map>

#include "engine/core/error.h"

namespace tessera {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> detect(const Variables& variables) {
  return detect_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

void expect_refused(const Variables& variables, const std::string& part) {
  try {
    detect(variables);
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(LaunchEnvironment, NoLauncher) {
  EXPECT_FALSE(detect({}));
  EXPECT_FALSE(detect({{"HOME", "/root"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(detect({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "1"}}));
  EXPECT_FALSE(detect({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
}

TEST(LaunchEnvironment, OwnVariablesComeFirst) {
  const auto found = detect({{"TESSERA_RANK", "3"},
                             {"TESSERA_WORLD_SIZE", "8"},
                             {"TESSERA_LOCAL_RANK", "1"},
                             {"TESSERA_RENDEZVOUS", "node1:5000"},
                             {"RANK", "0"},
                             {"WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_SIZE", "4"}});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 3);
  EXPECT_EQ(found->world_size, 8);
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->rendezvous, "node1:5000");
  EXPECT_FALSE(found->is_own_child);
}

TEST(LaunchEnvironment, TorchStyle) {
  Variables variables = {{"RANK", "5"},           {"WORLD_SIZE", "16"},     {"LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}, {"SLURM_JOB_ID", "7"},
                         {"SLURM_NTASKS", "9"}};
  EXPECT_EQ(detect(variables)->rendezvous, "head:29500");
  EXPECT_EQ(detect(variables)->rank, 5);
  EXPECT_EQ(detect(variables)->local_rank, 1);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(detect(variables)->rendezvous, "head:29501");
  variables["TESSERA_RENDEZVOUS"] = "other:1234";
  EXPECT_EQ(detect(variables)->rendezvous, "other:1234");
}

TEST(LaunchEnvironment, OpenMpi) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", "1234.1"}};
  EXPECT_TRUE(detect(variables)->has_mpi);
  EXPECT_EQ(detect(variables)->rendezvous, "");  // to be learned through MPI
  EXPECT_EQ(detect(variables)->local_rank, 0);
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4";
  EXPECT_NE(detect(variables)->rendezvous.find("1234.1"), std::string::npos);
}

TEST(LaunchEnvironment, MpirunInsideSlurmIsNotTheSlurmTask) {
  // mpirun starts its daemons with srun: their SLURM_PROCID is not the rank.
  const auto found = detect({{"OMPI_COMM_WORLD_RANK", "5"},
                             {"OMPI_COMM_WORLD_SIZE", "8"},
                             {"SLURM_JOB_ID", "7"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_PROCID", "1"},
                             {"SLURM_STEP_NUM_TASKS", "2"},
                             {"SLURM_NTASKS", "8"}});
  EXPECT_EQ(found->rank, 5);
  EXPECT_EQ(found->world_size, 8);
  EXPECT_EQ(found->rendezvous, "");
}

// srun --mpi=pmi2 sets PMI_*, but programs of Open MPI do not start under it.
TEST(LaunchEnvironment, SlurmWithPmi2HasNoMpi) {
  Variables variables = {{"PMI_RANK", "1"},      {"PMI_SIZE", "2"},
                         {"SLURM_JOB_ID", "7"},  {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "1"},  {"SLURM_STEP_NUM_TASKS", "2"},
                         {"SLURM_LOCALID", "1"}, {"SLURM_NTASKS", "2"}};
  EXPECT_EQ(detect(variables)->rank, 1);
  EXPECT_EQ(detect(variables)->rendezvous, "unix:@tessera-slurm-7.0");
  EXPECT_FALSE(detect(variables)->has_mpi);
  // MPICH's own launcher.
  EXPECT_TRUE(detect({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}})->has_mpi);
}

TEST(LaunchEnvironment, SlurmStep) {
  Variables variables = {{"SLURM_JOB_ID", "1000"},      {"SLURM_STEP_ID", "2"},
                         {"SLURM_PROCID", "3"},         {"SLURM_NTASKS", "4"},
                         {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"}};
  const auto found = detect(variables);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 3);
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->rendezvous, "gpu07:21002");
  EXPECT_EQ(found->token, "1000.2");
  EXPECT_FALSE(found->has_mpi);
  variables["PMIX_RANK"] = "3";
  EXPECT_TRUE(detect(variables)->has_mpi);
  variables["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ(detect(variables)->rendezvous, "unix:@tessera-slurm-1000.2");
}

TEST(LaunchEnvironment, PromisesThatAreNotKeptAreRefused) {
  // A batch script that forgot srun, and a shell of salloc.
  expect_refused({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}, "srun");
  expect_refused({{"SLURM_JOB_ID", "7"},
                  {"SLURM_NTASKS", "4"},
                  {"SLURM_PROCID", "0"},
                  {"SLURM_STEP_ID", "4294967290"},
                  {"SLURM_STEP_NUM_TASKS", "1"}},
                 "promises 4 tasks");
  // Asked for on purpose.
  EXPECT_FALSE(detect({{"SLURM_JOB_ID", "7"},
                       {"SLURM_NTASKS", "4"},
                       {"TESSERA_RANK", "0"},
                       {"TESSERA_WORLD_SIZE", "1"}}));
}

TEST(LaunchEnvironment, HalfTheVariablesAreRefused) {
  expect_refused({{"RANK", "1"}}, "WORLD_SIZE is not");
  expect_refused({{"WORLD_SIZE", "4"}}, "RANK is not");
  expect_refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}}, "MASTER_ADDR");
  expect_refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}}, "MASTER_PORT");
  expect_refused({{"RANK", "4"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}},
                 "below");
  expect_refused({{"RANK", "one"}, {"WORLD_SIZE", "4"}}, "'one'");
  expect_refused({{"TESSERA_RANK", "1"}}, "TESSERA_WORLD_SIZE");
  expect_refused({{"TESSERA_RANK", "1"}, {"TESSERA_WORLD_SIZE", "2"}}, "TESSERA_RENDEZVOUS");
}

TEST(LaunchEnvironment, FirstHost) {
  EXPECT_EQ(first_host("gpu007"), "gpu007");
  EXPECT_EQ(first_host("gpu[007-012,020],login1"), "gpu007");
  EXPECT_EQ(first_host("rack[2,5]-node[10-11].local,x"), "rack2-node10.local");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host(""), "");
}

}  // namespace
}  // namespace tessera
