// Device as a value: which kind of memory and processor a tensor or a stream belongs to.
#pragma once

#include <string>

namespace tessera {

enum class DeviceKind : unsigned char {
  kCpu,
  kCuda,
  kMeta,  // shapes and byte counts only; no data
};

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

std::string to_string(Device device);  // "cpu", "cuda:1", "meta"

}  // namespace tessera
