#include "parallel/control/control_plane.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <thread>

#include "parallel/communicator.h"
#include "parallel/control/server.h"
#include "parallel/control/wire.h"

namespace tessera {
namespace {

enum class Kind { kLocal, kUnix, kTcp };

ControlOptions fast_options() {
  ControlOptions options;
  options.token = "secret";
  options.connect_seconds = 20;
  options.beat_seconds = 0.1;
  options.silence_seconds = 20;
  options.loss_grace_seconds = 0.1;
  return options;
}

// The planes of a whole world in one process; the ranks are threads of the test.
struct World {
  std::unique_ptr<ControlServer> server;
  std::vector<std::unique_ptr<ControlPlane>> ranks;

  World(Kind kind, int size, ControlOptions options = fast_options()) {
    if (kind == Kind::kLocal) {
      ranks = make_local_control_planes(size);
      return;
    }
    static std::atomic<int> count = 0;
    const std::string address = kind == Kind::kTcp
                                    ? "127.0.0.1:0"
                                    : fmt::format("unix:@tessera-test-{}-{}", ::getpid(), ++count);
    server = std::make_unique<ControlServer>(address, size, options);
    for (int r = 0; r < size; ++r) {
      ranks.push_back(connect_control_plane(server->address(), r, size, options));
    }
  }
  ~World() {
    for (const auto& rank : ranks) {
      if (rank != nullptr) rank->leave();
    }
  }

  template <typename Body>
  void run(Body&& body) {
    std::vector<std::thread> threads;
    for (const auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
    for (std::thread& thread : threads) thread.join();
  }
};

class ControlPlaneTest : public testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Kinds, ControlPlaneTest,
                         testing::Values(Kind::kLocal, Kind::kUnix, Kind::kTcp),
                         [](const auto& info) {
                           return info.param == Kind::kLocal  ? "Local"
                                  : info.param == Kind::kUnix ? "Unix"
                                                              : "Tcp";
                         });

TEST_P(ControlPlaneTest, GetWaitsForSet) {
  World world(GetParam(), 3);
  const std::string blob("a\0b\n", 4);
  world.run([&](ControlPlane& control) {
    if (control.rank() == 1) {
      EXPECT_FALSE(control.peek("nobody sets this"));
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      control.set("key", blob);
    }
    EXPECT_EQ(control.get("key", 20), blob);
    EXPECT_EQ(control.peek("key"), blob);
    EXPECT_EQ(control.broadcast("id", control.rank() == 2 ? "two" : "", 2, 20), "two");
    EXPECT_EQ(control.broadcast("id", control.rank() == 0 ? "zero" : "", 0, 20), "zero");
  });
}

TEST_P(ControlPlaneTest, LargeValuesArriveWhole) {
  World world(GetParam(), 2);
  std::string blob(3 << 20, 'x');
  for (std::size_t i = 0; i < blob.size(); i += 997) blob[i] = static_cast<char>(i);
  world.run([&](ControlPlane& control) {
    EXPECT_TRUE(control.broadcast("big", control.rank() == 0 ? blob : "", 0, 20) == blob);
  });
}

TEST_P(ControlPlaneTest, BarrierHoldsEveryRank) {
  World world(GetParam(), 4);
  std::atomic<int> before = 0;
  world.run([&](ControlPlane& control) {
    for (int round = 1; round <= 5; ++round) {
      if (control.rank() == round % 4) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++before;
      control.barrier("round", 20);
      EXPECT_GE(before.load(), 4 * round);
      control.barrier("next", 20);
    }
  });
}

TEST_P(ControlPlaneTest, BarrierNamesTheMissing) {
  World world(GetParam(), 4);
  world.run([&](ControlPlane& control) {
    if (control.rank() == 1 || control.rank() == 3) return;
    try {
      control.barrier("start", 0.2);
      ADD_FAILURE() << "the barrier opened";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTransient);
      EXPECT_NE(std::string(error.what()).find("for rank 1, 3"), std::string::npos) << error.what();
    }
  });
}

TEST_P(ControlPlaneTest, FirstErrorReachesEveryRank) {
  World world(GetParam(), 3);
  std::atomic<int> callbacks = 0;
  world.run([&](ControlPlane& control) {
    std::atomic<bool> is_called = false;
    control.on_abort([&](const FailureReport& report) {
      EXPECT_EQ(report.rank, 1);
      ++callbacks;
      is_called = true;
    });
    if (control.rank() == 1) {
      control.barrier("ready", 20);
      control.report_error(ErrorKind::kUser, "row 7 is bad");
      control.report_error(ErrorKind::kInternal, "and then everything fell down");
    } else {
      // The failure may come while this rank is still on its way out of the barrier.
      EXPECT_THROW(
          {
            control.barrier("ready", 20);
            control.get("never", 20);
          },
          AbortedError);
    }
    const auto failure = control.wait_failure(20);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->rank, 1);
    EXPECT_EQ(failure->kind, ErrorKind::kUser);
    EXPECT_EQ(failure->text, "row 7 is bad");
    // The failure may be known a moment before the callback's thread has run it; replacing it then
    // would take it away.
    for (int i = 0; control.rank() != 1 && !is_called && i < 20'000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // A callback that is registered late runs at once, except on the rank that failed.
    if (control.rank() == 2) {
      bool has_run = false;
      control.on_abort([&](const FailureReport&) { has_run = true; });
      EXPECT_TRUE(has_run);
    }
    control.on_abort({});
  });
  EXPECT_EQ(callbacks.load(), 2);
}

TEST_P(ControlPlaneTest, RanksAgreeOnTheEdgeToStopAt) {
  for (const int requester : {0, 2}) {
    World world(GetParam(), 3);
    std::mutex mutex;
    std::multiset<std::int64_t> stops;
    world.run([&](ControlPlane& control) {
      for (std::int64_t edge = 0; edge < 100000; ++edge) {
        if (control.rank() == requester && edge == 20) control.request_stop("SIGTERM");
        // Ranks run at different speed, as between collectives.
        if (edge % 7 == control.rank()) std::this_thread::sleep_for(std::chrono::microseconds(300));
        if (const auto decision = control.agreed_stop(edge)) {
          EXPECT_EQ(decision->edge, edge);
          EXPECT_EQ(decision->reason, "SIGTERM");
          const std::lock_guard lock(mutex);
          stops.insert(edge);
          return;
        }
        // Asking again at the same edge changes nothing.
        EXPECT_FALSE(control.agreed_stop(edge));
      }
      ADD_FAILURE() << "rank " << control.rank() << " never stopped";
    });
    ASSERT_EQ(stops.size(), 3u);
    EXPECT_EQ(*stops.begin(), *stops.rbegin());
    EXPECT_GE(*stops.begin(), 20);
  }
}

TEST(ControlServerTest, LostRankIsAFailure) {
  for (const Kind kind : {Kind::kUnix, Kind::kTcp}) {
    World world(kind, 3);
    world.ranks[1].reset();  // no goodbye
    const auto failure = world.ranks[0]->wait_failure(20);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->rank, 1);
    EXPECT_EQ(failure->kind, ErrorKind::kTransient);
    EXPECT_NE(failure->text.find("rank 1"), std::string::npos) << failure->text;
    EXPECT_TRUE(world.ranks[2]->wait_failure(20));
  }
}

TEST(ControlServerTest, ExplanationOfTheLauncherWins) {
  ControlOptions options = fast_options();
  options.loss_grace_seconds = 5;
  World world(Kind::kUnix, 2, options);
  world.ranks[1].reset();
  world.server->report_error(1, ErrorKind::kTransient, "rank 1 was killed by signal 9");
  EXPECT_EQ(world.ranks[0]->wait_failure(20)->text, "rank 1 was killed by signal 9");
}

TEST(ControlServerTest, GoodbyeIsNoFailure) {
  World world(Kind::kTcp, 2);
  EXPECT_FALSE(world.server->wait_all_left(0));
  world.ranks[1]->leave();
  world.ranks[1].reset();
  world.ranks[0]->set("still", "here");
  EXPECT_EQ(world.ranks[0]->get("still", 20), "here");
  // The rank that left does not hold up a decision.
  world.ranks[0]->request_stop("enough");
  std::int64_t edge = 0;
  while (!world.ranks[0]->agreed_stop(edge)) ++edge;
  EXPECT_FALSE(world.ranks[0]->first_failure());
  world.ranks[0]->leave();
  EXPECT_TRUE(world.server->wait_all_left(20));
}

TEST(ControlServerTest, LostServerIsAFailure) {
  World world(Kind::kTcp, 2);
  std::atomic<int> callbacks = 0;
  std::promise<void> has_run;
  world.ranks[1]->on_abort([&](const FailureReport&) {
    if (++callbacks == 1) has_run.set_value();
  });
  world.server.reset();
  const auto failure = world.ranks[1]->wait_failure(20);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kTransient);
  EXPECT_NE(failure->text.find("lost the control server"), std::string::npos) << failure->text;
  // The failure is known a little before the callback runs, which removing it would prevent.
  EXPECT_EQ(has_run.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  world.ranks[1]->on_abort({});
  EXPECT_EQ(callbacks.load(), 1);
  // Later calls end at once.
  EXPECT_THROW(world.ranks[1]->get("key", 20), AbortedError);
}

// A peer whose machine is gone sends nothing, not even the end of the connection.
TEST(ControlServerTest, SilenceIsAFailure) {
  ControlOptions options = fast_options();
  options.silence_seconds = 0.5;
  ControlServer server("127.0.0.1:0", 2, options);
  const auto alive = connect_control_plane(server.address(), 0, 2, options);
  std::string problem;
  control::Socket silent = control::connect_to(server.address(), 5, &problem);
  ASSERT_TRUE(silent.is_open()) << problem;
  std::string hello =
      control::encode({control::MessageKind::kHello, 1, 2, "a silent peer", "secret"});
  ASSERT_TRUE(control::send_available(silent, hello));
  const auto failure = alive->wait_failure(20);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->rank, 1);
  EXPECT_NE(failure->text.find("no heartbeat"), std::string::npos) << failure->text;
  alive->leave();
}

TEST(ControlServerTest, WrongPeersAreTurnedAway) {
  ControlOptions options = fast_options();
  ControlServer server("127.0.0.1:0", 2, options);
  const auto first = connect_control_plane(server.address(), 0, 2, options);
  const auto refused = [&](int rank, int world, const ControlOptions& with, const char* part) {
    try {
      connect_control_plane(server.address(), rank, world, with);
      ADD_FAILURE() << "rank " << rank << " of " << world << " was let in";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused(0, 2, options, "already");
  refused(1, 3, options, "counts 2");
  refused(2, 2, options, "rank 2 of 2");
  ControlOptions other = options;
  other.token = "another";
  refused(1, 2, other, "another job");
  // Somebody who speaks another protocol is dropped without harm.
  std::string problem;
  control::Socket stranger = control::connect_to(server.address(), 5, &problem);
  std::string noise = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  ASSERT_TRUE(control::send_available(stranger, noise));
  const auto second = connect_control_plane(server.address(), 1, 2, options);
  EXPECT_FALSE(first->first_failure());
  first->leave();
  second->leave();
}

TEST(ControlServerTest, NobodyThereIsSaidInWords) {
  ControlOptions options = fast_options();
  options.connect_seconds = 0.3;
  try {
    connect_control_plane("127.0.0.1:1", 3, 4, options);
    FAIL() << "connected";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTransient);
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:1"), std::string::npos) << error.what();
  }
  EXPECT_THROW(ControlServer("localhost", 1, options), Error);  // no port
}

TEST(ControlWire, MessagesSurviveAnySplit) {
  const control::Message message{control::MessageKind::kSet, -5, 7, "key", std::string("a\0b", 3)};
  const std::string bytes =
      control::encode(message) + control::encode({control::MessageKind::kBeat});
  std::string in;
  std::vector<control::Message> got;
  bool is_bad = false;
  for (const char byte : bytes) {
    in += byte;
    while (auto one = control::decode(in, &is_bad)) got.push_back(*one);
    ASSERT_FALSE(is_bad);
  }
  ASSERT_EQ(got.size(), 2u);
  EXPECT_EQ(got[0].number, -5);
  EXPECT_EQ(got[0].number2, 7);
  EXPECT_EQ(got[0].key, "key");
  EXPECT_EQ(got[0].value, message.value);
  EXPECT_TRUE(in.empty());
}

}  // namespace
}  // namespace tessera
