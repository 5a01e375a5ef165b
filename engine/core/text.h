// Small helpers for text from users: numbers that must be consumed whole, durations, sizes, nearest
// names for messages, and expansion of ~ and ${VAR} in paths.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Decimal integers: "8", "-1", "1_000", and "1e9" or "2.5e3" where the value is integral. Nothing if
// the text is anything else or does not fit 64 bits; leading zeros ("010") are refused because
// YAML 1.1 reads them as octal.
std::optional<std::int64_t> parse_integer(std::string_view text);

// Finite decimal numbers: "0.1", "1e-4", ".5", "1_000.5".
std::optional<double> parse_number(std::string_view text);

// true/false, yes/no, on/off in lower, upper or title case.
std::optional<bool> parse_bool(std::string_view text);

// Seconds of "90", "90s", "10m", "1h30m", "2d", "01:30:00" or Slurm's "1-12:00:00".
std::optional<double> parse_duration(std::string_view text);

// Bytes of "1024", "512M", "40GiB", "1.5 GB". K, M, G, T mean powers of 1024, as do KiB, MiB, ...;
// kB, KB, MB, GB, TB mean powers of 1000.
std::optional<std::int64_t> parse_bytes(std::string_view text);

// The shortest text that reads back to the same value: "1e-4", "0.95", "1.0".
std::string format_number(double value);

// Edits (insertions, deletions, substitutions, swaps of neighbours) between two names.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate that `name` was most probably meant to be; nothing if none is near.
std::optional<std::string> nearest_name(std::string_view name,
                                        const std::vector<std::string>& candidates);

// "a", "a or b", "a, b or c".
std::string join_choices(const std::vector<std::string>& choices);

// Expands a leading ~ and every ${VAR}. On failure returns nothing and sets `problem` to the reason
// ("the environment variable SCRATCH is not set").
std::optional<std::string> expand_path(std::string_view path, std::string* problem);

// The position after the last whole UTF-8 character if `text` holds an invalid one; npos if valid.
std::size_t find_invalid_utf8(std::string_view text);

}  // namespace tessera
