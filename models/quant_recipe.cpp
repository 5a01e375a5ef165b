#include "models/quant_recipe.h"

namespace tessera {

bool names_layer(const std::string& entry, const std::string& layer) {
  return !entry.empty() && ("." + layer + ".").find("." + entry + ".") != std::string::npos;
}

}  // namespace tessera
