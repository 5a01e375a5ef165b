#include "parallel/peer_window.h"

namespace tessera {

PeerWindow::~PeerWindow() = default;

}  // namespace tessera
