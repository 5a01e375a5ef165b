// What travels between the ranks and the control server: small framed messages over a stream
// socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::control {

enum class MessageKind : std::uint8_t {
  // rank to server
  kHello,   // number = rank, number2 = world size, key = who (host and process), value = token
  kSet,     // key, value
  kGet,     // number = request, key; number2 = 1 to be answered at once
  kReport,  // number = ErrorKind, value = text
  kStop,    // value = reason
  kPassed,  // number = last edge passed; answers kFreeze
  kBye,
  // server to rank
  kWelcome,
  kRefuse,   // value = why
  kValue,    // number = request, value; number2 = 1 where a kGet at once found nothing
  kFailure,  // number = rank, number2 = ErrorKind, key = "lost" or empty, value = text
  kFreeze,   // pass no further edge until kStopAt
  kStopAt,   // number = edge, value = reason
  // both
  kBeat,
};

struct Message {
  MessageKind kind = MessageKind::kBeat;
  std::int64_t number = 0;
  std::int64_t number2 = 0;
  std::string key;
  std::string value;
};

std::string encode(const Message& message);
// Takes one whole message from the front of `bytes`; nothing if it is not complete yet. Sets
// `is_bad` when the bytes cannot be ours.
std::optional<Message> decode(std::string& bytes, bool* is_bad);

// An open file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release();
  void close();

 private:
  int fd_ = -1;
};

bool is_unix_address(std::string_view address);
// Listens, non-blocking; kUser if the address cannot be used. `bound` becomes the address with the
// port that was chosen for port 0.
Socket listen_on(const std::string& address, std::string* bound);
// One try; an invalid socket and the reason in `problem` if nobody answers.
Socket connect_to(const std::string& address, double timeout_seconds, std::string* problem);
// Accepts one waiting connection, non-blocking; invalid if there is none.
Socket accept_from(const Socket& listener);

// Appends what has arrived to `bytes`. False when the peer has closed or the connection is broken.
bool receive_available(const Socket& socket, std::string& bytes);
// Sends from the front of `bytes` what the socket takes without blocking. False when broken.
bool send_available(const Socket& socket, std::string& bytes);

// Wakes a thread that sits in poll().
class WakePipe {
 public:
  WakePipe();
  int fd() const { return event_.fd(); }
  void wake() noexcept;
  void drain() noexcept;

 private:
  Socket event_;
};

double monotonic_seconds();
std::string host_name();

}  // namespace tessera::control
