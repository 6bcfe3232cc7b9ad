// What is known to have happened before what, on a device that has streams. No torch in here.
//
// The host and every stream are actors. Each has a vector clock: how far it knows every actor to have come. A launch is one
// point in the time of its stream. Of two accesses to the same bytes, of which one writes, the later actor must know of the
// earlier launch; otherwise a real device may run them in any order, or at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Actor = size_t; // the host is 0, stream s is s + 1
constexpr Actor kHost = 0;
// PyTorch takes side streams of CUDA in turn from a pool of this size (c10/cuda/CUDAStream.h); so do we, which also bounds
// the clocks. A communicator has streams of its own beyond it.
constexpr int64_t kPoolStreams = 32;

class Clock {
 public:
  int64_t operator[](Actor actor) const {
    return actor < times_.size() ? times_[actor] : 0;
  }
  int64_t advance(Actor actor);
  void join(const Clock& other);

 private:
  std::vector<int64_t> times_;
};

// One launch on a stream, or one touch by the host.
struct Launch {
  Actor actor;
  int64_t time;
  std::string what;
  std::string where; // lines of Python, innermost first
};
using LaunchPtr = std::shared_ptr<const Launch>;

struct Wait {
  std::string what;
  std::string where;
};

class Model {
 public:
  // Streams and events. An event is the clock of its stream when it was recorded.
  int64_t stream_of_pool();
  int64_t stream_of_its_own();
  LaunchPtr launch(int64_t stream, const std::string& what, const std::string& where);
  Clock record(int64_t stream);
  void wait(int64_t stream, const Clock& event);
  void host_waits(const Clock& event, const std::string& what, const std::string& where);
  void host_knows(const Clock& event);
  Clock everything();

  // Memory. The caching allocator of CUDA gives freed memory out again to its stream at once. That is right where the stream
  // knows of all accesses, and where `record_stream` tells the allocator to wait. As CUDA splits and joins blocks, any next
  // allocation of the stream may get the bytes: the verdict on what is unsettled falls there, not where the tensor dies.
  void* allocate(size_t bytes, int64_t stream);
  void* allocate_pinned(size_t bytes);
  bool free(void* start); // whether it is unsettled, and then wants a name
  void name_free(const void* start, const std::string& where);
  bool unsettled(int64_t stream);
  void settle(int64_t stream, const std::string& where);

  // `touch` ignores what was not given out here: ordinary memory of the host.
  void record_stream(const void* address, int64_t stream);
  void touch(const void* address, size_t bytes, bool writes, const LaunchPtr& launch);
  void host_touches(const void* address, size_t bytes, bool writes, const std::string& what, const std::string& where);
  bool is_pinned(const void* address);
  bool has_pinned();

  // Findings since `reset`, which also forgets every access, as if the host had waited for the whole device.
  std::vector<std::string> races();
  std::vector<std::string> early_frees();
  std::vector<Wait> waits();
  std::vector<std::string> launches();
  void reset();

  // What went wrong on the device, told at the host's next wait or launch, as NCCL does.
  void fail(const std::string& message);
  std::optional<std::string> failure();

 private:
  struct Access {
    LaunchPtr launch;
    const char* begin;
    const char* end;
    bool writes;
  };
  struct Block {
    char* start;
    size_t size;
    Actor owner; // the stream it was given out on, or the host for pinned memory
    std::vector<Access> accesses; // those that somebody may still have to know of
    std::set<Actor> recorded;
    std::string freed_at;
  };
  using BlockPtr = std::unique_ptr<Block>;

  Clock& clock(Actor actor);
  bool knows(Actor actor, const Launch& launch);
  Block* find(const void* address);
  void* give_out(size_t bytes, Actor owner);

  std::recursive_mutex mutex_;
  int64_t taken_ = 0;
  int64_t own_ = 0;
  std::vector<Clock> clocks_;
  std::map<const char*, BlockPtr> blocks_; // in use, by their start
  std::map<std::pair<Actor, size_t>, std::vector<BlockPtr>> pool_;
  std::map<Actor, std::vector<Block*>> unsettled_; // in the pool, with accesses that may still be under way
  size_t pinned_ = 0;
  std::vector<std::string> races_, early_frees_, launches_;
  std::vector<Wait> waits_;
  std::optional<std::string> failure_;
};

Model& model();

// The lines of Python that led here, innermost first; see lines.cpp.
std::string where();
void watch(std::vector<std::string> roots, std::vector<std::string> harness);

} // namespace sim
