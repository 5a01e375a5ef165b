#include "engine/core/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace tessera {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// Removes underscores that stand between two digits; nothing if one stands elsewhere.
std::optional<std::string> without_separators(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      result += text[i];
    } else if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
      return std::nullopt;
    }
  }
  return result;
}

// Digits, optional fraction, optional exponent; at least one digit; no sign.
bool is_decimal(std::string_view text) {
  std::size_t i = 0;
  std::size_t digits = 0;
  while (i < text.size() && is_digit(text[i])) ++i, ++digits;
  if (i < text.size() && text[i] == '.') {
    ++i;
    while (i < text.size() && is_digit(text[i])) ++i, ++digits;
  }
  if (digits == 0) return false;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    const std::size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    if (i == begin) return false;
  }
  return i == text.size();
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// [D-]HH:MM[:SS] as Slurm writes time limits; MM:SS is not taken because it is read both ways.
std::optional<double> parse_clock(std::string_view text) {
  double days = 0;
  if (const std::size_t dash = text.find('-'); dash != std::string_view::npos) {
    const auto value = parse_integer(text.substr(0, dash));
    if (!value || *value < 0) return std::nullopt;
    days = static_cast<double>(*value);
    text.remove_prefix(dash + 1);
  }
  std::array<double, 3> parts{};
  std::size_t count = 0;
  while (true) {
    const std::size_t colon = text.find(':');
    const std::string_view part = text.substr(0, colon);
    if (count == 3 || part.empty() || part.size() > 6) return std::nullopt;
    double value = 0;
    for (const char c : part) {
      if (!is_digit(c)) return std::nullopt;
      value = value * 10 + (c - '0');
    }
    if (count > 0 && value >= 60) return std::nullopt;
    parts[count++] = value;
    if (colon == std::string_view::npos) break;
    text.remove_prefix(colon + 1);
  }
  if (count != 3) return std::nullopt;
  return ((days * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2];
}

}  // namespace

std::optional<std::int64_t> parse_integer(std::string_view text) {
  const auto plain = without_separators(text);
  if (!plain || plain->empty()) return std::nullopt;
  std::string_view digits = *plain;
  const bool negative = digits.front() == '-';
  if (negative || digits.front() == '+') digits.remove_prefix(1);
  if (!is_decimal(digits)) return std::nullopt;
  if (digits.size() > 1 && digits[0] == '0' && is_digit(digits[1])) return std::nullopt;
  if (std::all_of(digits.begin(), digits.end(), is_digit)) {
    std::int64_t value = 0;
    const std::string signed_text = (negative ? "-" : "") + std::string(digits);
    const char* end = signed_text.data() + signed_text.size();
    const auto result = std::from_chars(signed_text.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
    return value;
  }
  const auto number = parse_number(*plain);
  // 2^53: beyond it a decimal fraction or exponent may not name one integer.
  if (!number || std::fabs(*number) > 0x1p53 || *number != std::floor(*number)) return std::nullopt;
  return static_cast<std::int64_t>(*number);
}

std::optional<double> parse_number(std::string_view text) {
  const auto plain = without_separators(text);
  if (!plain || plain->empty()) return std::nullopt;
  std::string_view digits = *plain;
  const bool negative = digits.front() == '-';
  if (negative || digits.front() == '+') digits.remove_prefix(1);
  if (!is_decimal(digits)) return std::nullopt;
  if (digits.size() > 1 && digits[0] == '0' && is_digit(digits[1])) return std::nullopt;
  double value = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  // Underflow is refused with overflow: 1e-400 is not the zero that it would become.
  if (result.ec != std::errc() || result.ptr != digits.data() + digits.size()) return std::nullopt;
  if (!std::isfinite(value)) return std::nullopt;
  return negative ? -value : value;
}

std::optional<bool> parse_bool(std::string_view text) {
  const std::string folded = lower(text);
  std::string title = folded;
  std::string upper = folded;
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (!title.empty()) title[0] = upper[0];
  if (text != folded && text != title && text != upper) return std::nullopt;
  if (folded == "true" || folded == "yes" || folded == "on") return true;
  if (folded == "false" || folded == "no" || folded == "off") return false;
  return std::nullopt;
}

std::optional<double> parse_duration(std::string_view text) {
  text = trim(text);
  if (text.empty()) return std::nullopt;
  if (text.find(':') != std::string_view::npos) return parse_clock(text);
  double seconds = 0;
  double previous_unit = INFINITY;  // units must fall: "1h30m", not "30m1h"
  while (!text.empty()) {
    std::size_t length = 0;
    while (length < text.size() && (is_digit(text[length]) || text[length] == '.')) ++length;
    const auto value = parse_number(text.substr(0, length));
    if (!value) return std::nullopt;
    text = trim(text.substr(length));
    std::size_t unit_length = 0;
    while (unit_length < text.size() && std::isalpha(static_cast<unsigned char>(text[unit_length]))) {
      ++unit_length;
    }
    const std::string_view unit = text.substr(0, unit_length);
    text = trim(text.substr(unit_length));
    double unit_seconds = 0;
    if (unit == "d") {
      unit_seconds = 86400;
    } else if (unit == "h") {
      unit_seconds = 3600;
    } else if (unit == "m" || unit == "min") {
      unit_seconds = 60;
    } else if (unit == "s" || (unit.empty() && previous_unit == INFINITY && text.empty())) {
      unit_seconds = 1;
    } else {
      return std::nullopt;
    }
    if (unit_seconds >= previous_unit) return std::nullopt;
    previous_unit = unit_seconds;
    seconds += *value * unit_seconds;
  }
  return seconds;
}

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  text = trim(text);
  std::size_t length = 0;
  while (length < text.size() && (is_digit(text[length]) || text[length] == '.' || text[length] == '_')) {
    ++length;
  }
  const auto value = parse_number(text.substr(0, length));
  if (!value) return std::nullopt;
  const std::string_view unit = trim(text.substr(length));
  double scale = 0;
  if (unit.empty() || unit == "B") {
    scale = 1;
  } else {
    constexpr std::string_view kPrefixes = "KMGT";
    const char prefix = unit[0] == 'k' ? 'K' : unit[0];
    const std::size_t power = kPrefixes.find(prefix);
    if (power == std::string_view::npos) return std::nullopt;
    const std::string_view rest = unit.substr(1);
    if (rest.empty() || rest == "iB") {
      scale = std::pow(1024.0, static_cast<double>(power + 1));
    } else if (rest == "B") {
      scale = std::pow(1000.0, static_cast<double>(power + 1));
    } else {
      return std::nullopt;
    }
  }
  const double bytes = std::floor(*value * scale);
  if (bytes > 0x1p62) return std::nullopt;
  return static_cast<std::int64_t>(bytes);
}

std::string format_number(double value) {
  if (std::isnan(value)) return ".nan";
  if (std::isinf(value)) return value < 0 ? "-.inf" : ".inf";
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string text(buffer.data(), end);
  const std::size_t exponent = text.find('e');
  if (exponent == std::string::npos) {
    if (text.find('.') == std::string::npos) text += ".0";
    return text;
  }
  // to_chars writes 1e-04 and 1e+06; people write 1e-4 and 1e6.
  std::string result = text.substr(0, exponent + 1);
  std::size_t i = exponent + 1;
  if (text[i] == '-') result += '-';
  if (text[i] == '-' || text[i] == '+') ++i;
  while (i + 1 < text.size() && text[i] == '0') ++i;
  return result + text.substr(i);
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Optimal string alignment: three rows of the usual table.
  std::vector<std::size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitution = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

std::optional<std::string> nearest_name(std::string_view name,
                                        const std::vector<std::string>& candidates) {
  // Names from a hostile file may be huge; nothing that long is a misspelt key.
  if (name.empty() || name.size() > 100) return std::nullopt;
  auto folded = [](std::string_view text) {
    std::string result = lower(text);
    std::replace(result.begin(), result.end(), '-', '_');
    return result;
  };
  const std::string wanted = folded(name);
  std::optional<std::string> best;
  std::size_t best_distance = std::max<std::size_t>(1, wanted.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::string other = folded(candidate);
    std::size_t distance = edit_distance(wanted, other);
    // "batch" for "batch_size", "warmup" for "warmup_steps".
    const bool is_prefix = wanted.size() >= 4 && other.starts_with(wanted);
    if (is_prefix) distance = std::min<std::size_t>(distance, 1);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string join_choices(const std::vector<std::string>& choices) {
  std::string result;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) result += i + 1 == choices.size() ? " or " : ", ";
    result += choices[i];
  }
  return result;
}

std::optional<std::string> expand_path(std::string_view path, std::string* problem) {
  auto fail = [problem](std::string reason) -> std::optional<std::string> {
    if (problem != nullptr) *problem = std::move(reason);
    return std::nullopt;
  };
  std::string result;
  std::size_t i = 0;
  if (!path.empty() && path[0] == '~') {
    if (path.size() > 1 && path[1] != '/') {
      return fail("~ stands for your own home folder only; write the other folder in full");
    }
    const char* home = std::getenv("HOME");
    if (home == nullptr || *home == '\0') {
      return fail("~ cannot be expanded because the environment variable HOME is not set");
    }
    result = home;
    i = 1;
  }
  while (i < path.size()) {
    if (path.compare(i, 2, "${") != 0) {
      result += path[i++];
      continue;
    }
    const std::size_t close = path.find('}', i);
    if (close == std::string_view::npos) return fail("${ has no closing }");
    const std::string name(path.substr(i + 2, close - i - 2));
    const bool is_name = !name.empty() && !is_digit(name[0]) &&
                         std::all_of(name.begin(), name.end(), [](unsigned char c) {
                           return std::isalnum(c) || c == '_';
                         });
    if (!is_name) return fail("${" + name + "} is not the name of an environment variable");
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return fail("the environment variable " + name + " is not set");
    result += value;
    i = close + 1;
  }
  return result;
}

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    std::size_t length = 0;
    std::uint32_t code = 0;
    if (lead < 0x80) {
      ++i;
      continue;
    }
    if (lead >= 0xC2 && lead <= 0xDF) {
      length = 2;
      code = lead & 0x1Fu;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      length = 3;
      code = lead & 0x0Fu;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      length = 4;
      code = lead & 0x07u;
    } else {
      return i;
    }
    if (i + length > text.size()) return i;
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xC0u) != 0x80u) return i;
      code = (code << 6) | (next & 0x3Fu);
    }
    // Overlong forms, surrogates and numbers past the last plane.
    if ((length == 3 && code < 0x800) || (length == 4 && code < 0x10000) || code > 0x10FFFF ||
        (code >= 0xD800 && code <= 0xDFFF)) {
      return i;
    }
    i += length;
  }
  return std::string_view::npos;
}

}  // namespace tessera
