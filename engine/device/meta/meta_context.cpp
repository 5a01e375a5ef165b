// The meta device: allocations have no address, streams run nothing. Ops still check their arguments
// and report their scratch, so a dry run of a whole step yields the memory plan.
#include "engine/device/context.h"
#include "engine/device/stream.h"

namespace tessera::meta {
namespace {

class MetaEvent : public Event {
 public:
  void synchronize() override {}
  bool is_done() const override { return true; }
  double milliseconds_since(const Event&) const override { return 0; }
};

class MetaStream : public Stream {
 public:
  MetaStream(BackendContext* context, std::string name) : Stream(context, std::move(name)) {}
  void record(Event&) override {}
  void wait(const Event&) override {}
  void synchronize() override {}
  void copy_bytes(void*, const void*, std::size_t) override {}
  void set_zero(void*, std::size_t) override {}
};

class MetaContext : public BackendContext {
 public:
  explicit MetaContext(const ContextOptions& options)
      : BackendContext(Device{DeviceKind::kMeta, 0}, options.planned) {}
  void* allocate(std::size_t, MemoryKind) override { return nullptr; }
  void release(void*, std::size_t, MemoryKind) noexcept override {}
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<MetaStream>(this, name);
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<MetaEvent>(); }
};

}  // namespace

std::unique_ptr<BackendContext> make_context(const ContextOptions& options) {
  return std::make_unique<MetaContext>(options);
}

}  // namespace tessera::meta
