#include "engine/core/error.h"

namespace tessera {

int exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kAnswerNo:
      return 1;
    case ErrorKind::kUser:
      return 2;
    case ErrorKind::kInternal:
      return 3;
    case ErrorKind::kTransient:
      return 4;
  }
  return 3;
}

}  // namespace tessera
