// The part of docs/configuration.md that is made from the `visit` lists; a test holds the two together.
#pragma once

#include <string>

namespace tessera {

// Markdown: a table per section with every key, its default, and its meaning, choices, bounds and
// aliases. Keys that may change on resume are marked with a circle.
std::string configuration_reference();

}  // namespace tessera
