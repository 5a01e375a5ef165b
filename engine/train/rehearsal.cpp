#include "engine/train/rehearsal.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

// Cuts the part before `separator` off `rest`; all of it where there is none.
std::string_view cut(std::string_view& rest, char separator) {
  const std::size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view part = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return part;
}

RehearsedFault parse_fault(std::string_view text) {
  static const std::map<std::string_view, FaultKind> kKinds = {{"throw", FaultKind::kThrow},
                                                               {"kill", FaultKind::kKill},
                                                               {"sleep", FaultKind::kSleep},
                                                               {"slow", FaultKind::kSlow}};
  const auto fail = [text] {
    TESSERA_FAIL(ErrorKind::kUser,
                 "[train] TESSERA_FAULT has \"{}\"; write throw, kill, sleep or slow with a rank and a "
                 "step, as throw@rank=1,step=3, and a factor above 1 for slow, as "
                 "slow@rank=1,step=1,factor=1.3; several are parted by ;",
                 text);
  };
  std::string_view rest = text;
  const auto kind = kKinds.find(cut(rest, '@'));
  if (kind == kKinds.end()) fail();
  RehearsedFault fault{.kind = kind->second};
  bool has_rank = false, has_step = false, has_factor = false;
  while (!rest.empty()) {
    std::string_view value = cut(rest, ',');
    const std::string_view name = cut(value, '=');
    if (name == "factor") {
      const std::optional<double> number = parse_number(value);
      if (!number || *number <= 1 || has_factor) fail();
      fault.factor = *number;
      has_factor = true;
      continue;
    }
    const std::optional<std::int64_t> number = parse_integer(value);
    if (name == "rank" && number && *number >= 0 && *number < (1 << 30) && !has_rank) {
      fault.rank = static_cast<int>(*number);
      has_rank = true;
    } else if (name == "step" && number && *number >= 1 && !has_step) {
      fault.step = *number;
      has_step = true;
    } else {
      fail();
    }
  }
  if (!has_rank || !has_step || has_factor != (fault.kind == FaultKind::kSlow)) fail();
  return fault;
}

}  // namespace

std::vector<RehearsedFault> parse_faults(std::string_view text) {
  std::vector<RehearsedFault> faults;
  while (!text.empty()) faults.push_back(parse_fault(cut(text, ';')));
  return faults;
}

Rehearsal::Rehearsal(int rank, int ranks) : rank_(rank) {
  const char* text = std::getenv("TESSERA_FAULT");
  if (text == nullptr) return;
  faults_ = parse_faults(text);
  for (const RehearsedFault& fault : faults_) {
    CHECK_USER(fault.rank < ranks, "[train] TESSERA_FAULT names rank {}, and there are {} ranks, from 0 on",
               fault.rank, ranks);
  }
  if (rank == 0 && !faults_.empty()) log::warning("TESSERA_FAULT asks for faults: {}", text);
  std::erase_if(faults_, [rank](const RehearsedFault& fault) { return fault.rank != rank; });
}

void Rehearsal::at_forward(std::int64_t step) {
  for (const RehearsedFault& fault : faults_) {
    if (fault.kind == FaultKind::kSlow && step > fault.step) {
      std::this_thread::sleep_for((Clock::now() - last_) * (fault.factor - 1));
    }
    if (step != fault.step) continue;
    if (fault.kind == FaultKind::kThrow) {
      TESSERA_FAIL(ErrorKind::kInternal, "[train] rank {} fails in step {}: TESSERA_FAULT asks for it", rank_, step);
    }
    if (fault.kind == FaultKind::kKill) raise(SIGKILL);
    if (fault.kind == FaultKind::kSleep) std::this_thread::sleep_for(std::chrono::hours(24));
  }
  last_ = Clock::now();
}

}  // namespace tessera
