#include "parallel/control/wire.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/core/error.h"

namespace tessera::control {
namespace {

// Frame: magic, body length, then kind, two numbers, key length, key, value; little-endian hosts
// only, as everything else here. The magic turns away whoever knocks at the wrong port.
constexpr std::uint32_t kMagic = 0x54534331;
constexpr std::size_t kHeader = 8;
constexpr std::size_t kMaxBody = std::size_t{256} << 20;

template <typename T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
template <typename T>
T read_at(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

void set_flags(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}
void set_tcp_options(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

struct UnixAddress {
  sockaddr_un address{};
  socklen_t bytes = 0;
};
UnixAddress unix_address(const std::string& text) {
  const std::string path = text.substr(5);
  UnixAddress result;
  result.address.sun_family = AF_UNIX;
  CHECK_USER(!path.empty() && path.size() < sizeof result.address.sun_path,
             "[control] {} is no usable socket path: 1 to {} characters", text,
             sizeof result.address.sun_path - 1);
  std::memcpy(result.address.sun_path, path.data(), path.size());
  // The abstract namespace starts with a zero byte; its length counts.
  if (path[0] == '@') result.address.sun_path[0] = '\0';
  result.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() +
                                        (path[0] == '@' ? 0 : 1));
  return result;
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};
// The port of "host:port"; an IPv6 host may stand in brackets.
void split_address(const std::string& address, std::string* host, std::string* port) {
  const std::size_t colon = address.rfind(':');
  CHECK_USER(colon != std::string::npos && colon + 1 < address.size(),
             "[control] the address {} has no port; write host:port", address);
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (host->size() > 2 && host->front() == '[' && host->back() == ']') {
    *host = host->substr(1, host->size() - 2);
  }
}
int resolve(const std::string& host, const std::string& port, bool is_passive, AddressList* list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = is_passive ? AI_PASSIVE : 0;
  return getaddrinfo(host.empty() || host == "*" ? nullptr : host.c_str(), port.c_str(), &hints,
                     &list->first);
}

}  // namespace

std::string encode(const Message& message) {
  std::string out;
  const std::size_t body = 1 + 8 + 8 + 4 + message.key.size() + message.value.size();
  out.reserve(kHeader + body);
  append(out, kMagic);
  append(out, static_cast<std::uint32_t>(body));
  append(out, static_cast<std::uint8_t>(message.kind));
  append(out, message.number);
  append(out, message.number2);
  append(out, static_cast<std::uint32_t>(message.key.size()));
  out += message.key;
  out += message.value;
  return out;
}

std::optional<Message> decode(std::string& bytes, bool* is_bad) {
  *is_bad = false;
  if (bytes.size() < kHeader) return std::nullopt;
  const auto body = static_cast<std::size_t>(read_at<std::uint32_t>(bytes, 4));
  if (read_at<std::uint32_t>(bytes, 0) != kMagic || body < 21 || body > kMaxBody) {
    *is_bad = true;
    return std::nullopt;
  }
  if (bytes.size() < kHeader + body) return std::nullopt;
  Message message;
  message.kind = static_cast<MessageKind>(read_at<std::uint8_t>(bytes, kHeader));
  message.number = read_at<std::int64_t>(bytes, kHeader + 1);
  message.number2 = read_at<std::int64_t>(bytes, kHeader + 9);
  const auto key = static_cast<std::size_t>(read_at<std::uint32_t>(bytes, kHeader + 17));
  if (key > body - 21) {
    *is_bad = true;
    return std::nullopt;
  }
  message.key = bytes.substr(kHeader + 21, key);
  message.value = bytes.substr(kHeader + 21 + key, body - 21 - key);
  bytes.erase(0, kHeader + body);
  return message;
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Socket::release() { return std::exchange(fd_, -1); }

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool is_unix_address(std::string_view address) { return address.starts_with("unix:"); }

Socket listen_on(const std::string& address, std::string* bound) {
  if (is_unix_address(address)) {
    const UnixAddress at = unix_address(address);
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_USER(
        socket.is_open() &&
            ::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&at.address), at.bytes) == 0 &&
            ::listen(socket.fd(), 1024) == 0,
        "[control] cannot listen on {}: {}", address, std::strerror(errno));
    set_flags(socket.fd());
    *bound = address;
    return socket;
  }
  std::string host;
  std::string port;
  split_address(address, &host, &port);
  AddressList list;
  const int code = resolve(host, port, true, &list);
  CHECK_USER(code == 0, "[control] {} cannot be resolved: {}", address, gai_strerror(code));
  int problem = EADDRNOTAVAIL;
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    Socket socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.is_open()) continue;
    const int on = 1;
    const int off = 0;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ai_family == AF_INET6) {
      setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (::bind(socket.fd(), at->ai_addr, at->ai_addrlen) != 0 || ::listen(socket.fd(), 1024) != 0) {
      problem = errno;
      continue;
    }
    set_flags(socket.fd());
    sockaddr_storage name{};
    socklen_t bytes = sizeof name;
    getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &bytes);
    const int chosen = name.ss_family == AF_INET6
                           ? ntohs(reinterpret_cast<const sockaddr_in6*>(&name)->sin6_port)
                           : ntohs(reinterpret_cast<const sockaddr_in*>(&name)->sin_port);
    *bound = fmt::format("{}:{}", host.empty() || host == "*" ? host_name() : host, chosen);
    return socket;
  }
  TESSERA_FAIL(ErrorKind::kUser, "[control] cannot listen on {}: {}. Choose another port", address,
               std::strerror(problem));
}

Socket connect_to(const std::string& address, double timeout_seconds, std::string* problem) {
  const auto finish = [&](Socket socket, const sockaddr* at, socklen_t bytes) {
    if (!socket.is_open()) {
      *problem = std::strerror(errno);
      return Socket();
    }
    set_flags(socket.fd());
    if (::connect(socket.fd(), at, bytes) != 0) {
      if (errno != EINPROGRESS) {
        *problem = std::strerror(errno);
        return Socket();
      }
      pollfd wait{socket.fd(), POLLOUT, 0};
      int error = ETIMEDOUT;
      socklen_t size = sizeof error;
      if (::poll(&wait, 1, static_cast<int>(timeout_seconds * 1000)) > 0) {
        getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error != 0) {
        *problem = std::strerror(error);
        return Socket();
      }
    }
    return socket;
  };
  if (is_unix_address(address)) {
    const UnixAddress at = unix_address(address);
    return finish(Socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
                  reinterpret_cast<const sockaddr*>(&at.address), at.bytes);
  }
  std::string host;
  std::string port;
  split_address(address, &host, &port);
  AddressList list;
  const int code = resolve(host, port, false, &list);
  if (code != 0) {
    *problem = gai_strerror(code);
    return Socket();
  }
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    Socket socket = finish(Socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)),
                           at->ai_addr, at->ai_addrlen);
    if (!socket.is_open()) continue;
    set_tcp_options(socket.fd());
    return socket;
  }
  return Socket();
}

Socket accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket.is_open()) set_tcp_options(socket.fd());
  return socket;
}

bool receive_available(const Socket& socket, std::string& bytes) {
  char buffer[16384];
  for (;;) {
    const ssize_t got = ::recv(socket.fd(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      bytes.append(buffer, static_cast<std::size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
}

bool send_available(const Socket& socket, std::string& bytes) {
  std::size_t sent = 0;
  bool is_open = true;
  while (sent < bytes.size()) {
    const ssize_t put =
        ::send(socket.fd(), bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put >= 0) {
      sent += static_cast<std::size_t>(put);
      continue;
    }
    if (errno == EINTR) continue;
    is_open = errno == EAGAIN || errno == EWOULDBLOCK;
    break;
  }
  bytes.erase(0, sent);
  return is_open;
}

WakePipe::WakePipe() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK(event_.is_open(), "[control] no eventfd: {}", std::strerror(errno));
}

void WakePipe::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(event_.fd(), &one, sizeof one);
}

void WakePipe::drain() noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.fd(), &count, sizeof count);
}

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

}  // namespace tessera::control
