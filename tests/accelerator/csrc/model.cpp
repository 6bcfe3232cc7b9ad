#include "model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace sim {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

std::string name_of(Actor actor) {
  return actor == kHost ? "the host" : "stream " + std::to_string(actor - 1);
}

std::string at(const std::string& where) {
  return where.empty() ? "a thread of torch's own" : where;
}

std::string told(const Launch& launch) {
  return launch.what + " on " + name_of(launch.actor) + " (" + at(launch.where) + ")";
}

} // namespace

int64_t Clock::advance(Actor actor) {
  if (times_.size() <= actor)
    times_.resize(actor + 1);
  return ++times_[actor];
}

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size())
    times_.resize(other.times_.size());
  for (size_t actor = 0; actor < other.times_.size(); actor++)
    times_[actor] = std::max(times_[actor], other.times_[actor]);
}

Model& model() {
  static auto* one = new Model; // never destroyed: tensors may outlive every static
  return *one;
}

// Streams.

int64_t Model::stream_of_pool() {
  Lock lock(mutex_);
  return 1 + taken_++ % kPoolStreams;
}

int64_t Model::stream_of_its_own() {
  Lock lock(mutex_);
  return 1 + kPoolStreams + own_++;
}

Clock& Model::clock(Actor actor) {
  if (clocks_.size() <= actor)
    clocks_.resize(actor + 1);
  return clocks_[actor];
}

bool Model::knows(Actor actor, const Launch& launch) {
  // Whatever a stream runs next is launched by the host, and so after all that the host has waited for.
  return launch.actor == actor || clock(actor)[launch.actor] >= launch.time ||
      clock(kHost)[launch.actor] >= launch.time;
}

LaunchPtr Model::launch(int64_t stream, const std::string& what, const std::string& where) {
  Lock lock(mutex_);
  Actor actor = stream + 1;
  clock(actor).join(clock(kHost));
  launches_.push_back(what);
  return std::make_shared<Launch>(Launch{actor, clock(actor).advance(actor), what, where});
}

Clock Model::record(int64_t stream) {
  Lock lock(mutex_);
  return clock(stream + 1);
}

void Model::wait(int64_t stream, const Clock& event) {
  Lock lock(mutex_);
  clock(stream + 1).join(event);
}

void Model::host_waits(const Clock& event, const std::string& what, const std::string& where) {
  Lock lock(mutex_);
  waits_.push_back({what, where});
  host_knows(event);
}

void Model::host_knows(const Clock& event) {
  Lock lock(mutex_);
  clock(kHost).join(event);
}

Clock Model::everything() {
  Lock lock(mutex_);
  Clock all;
  for (auto& one : clocks_)
    all.join(one);
  return all;
}

// Memory.

Model::Block* Model::find(const void* address) {
  auto* at = static_cast<const char*>(address);
  auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin())
    return nullptr;
  Block* block = std::prev(after)->second.get();
  return at < block->start + block->size ? block : nullptr;
}

void* Model::give_out(size_t bytes, Actor owner) {
  size_t size = 512; // powers of two from the 512 bytes that CUDA's caching allocator rounds to: more is given out again
  while (size < bytes)
    size *= 2;
  auto& free = pool_[{owner, size}];
  BlockPtr block;
  if (free.empty()) {
    void* start = nullptr;
    if (posix_memalign(&start, 512, size))
      throw std::bad_alloc();
    block = std::make_unique<Block>(Block{static_cast<char*>(start), size, owner, {}, {}, {}});
  } else {
    block = std::move(free.back());
    free.pop_back();
  }
  std::memset(block->start, 0xff, size); // NaN in every floating-point type
  void* start = block->start;
  blocks_[block->start] = std::move(block);
  return start;
}

void* Model::allocate(size_t bytes, int64_t stream) {
  Lock lock(mutex_);
  return give_out(bytes, stream + 1);
}

void* Model::allocate_pinned(size_t bytes) {
  Lock lock(mutex_);
  pinned_++;
  return give_out(bytes, kHost);
}

bool Model::free(void* start) {
  Lock lock(mutex_);
  auto found = blocks_.find(static_cast<char*>(start));
  BlockPtr block = std::move(found->second);
  blocks_.erase(found);
  // The host's allocator waits for the copies that use pinned memory before it gives it out again; the device's, for all
  // that a recorded stream has been given to do, and so for what that stream waits for.
  bool pinned = block->owner == kHost;
  pinned_ -= pinned;
  auto over = [&](const Access& access) {
    bool known = pinned || knows(block->owner, *access.launch);
    for (Actor actor : block->recorded)
      known = known || knows(actor, *access.launch);
    return known;
  };
  auto& accesses = block->accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), over), accesses.end());
  block->recorded.clear();
  block->freed_at = "";
  if (!accesses.empty())
    unsettled_[block->owner].push_back(block.get());
  pool_[{block->owner, block->size}].push_back(std::move(block));
  return !accesses.empty();
}

void Model::name_free(const void* start, const std::string& where) {
  Lock lock(mutex_);
  for (auto& [owner, blocks] : unsettled_)
    for (Block* block : blocks)
      if (block->start == start)
        block->freed_at = where;
}

bool Model::unsettled(int64_t stream) {
  Lock lock(mutex_);
  return !unsettled_[stream + 1].empty();
}

void Model::settle(int64_t stream, const std::string& where) {
  Lock lock(mutex_);
  Actor owner = stream + 1;
  for (Block* block : unsettled_[owner]) {
    for (auto& access : block->accesses)
      if (!knows(owner, *access.launch)) {
        early_frees_.push_back(
            "freed early: memory of " + name_of(owner) + ", freed at " + at(block->freed_at) +
            ", may be given out again at " + at(where) + " while " + told(*access.launch) + " may still " +
            (access.writes ? "write" : "read") + " it");
        break;
      }
    block->accesses.clear();
  }
  unsettled_[owner].clear();
}

void Model::record_stream(const void* address, int64_t stream) {
  Lock lock(mutex_);
  if (Block* block = find(address))
    block->recorded.insert(stream + 1);
}

void Model::touch(const void* address, size_t bytes, bool writes, const LaunchPtr& launch) {
  Lock lock(mutex_);
  Block* block = bytes ? find(address) : nullptr;
  if (!block)
    return;
  Access now{launch, static_cast<const char*>(address), static_cast<const char*>(address) + bytes, writes};
  std::vector<Access> kept;
  for (auto& old : block->accesses) {
    bool known = knows(launch->actor, *old.launch);
    bool overlap = old.begin < now.end && now.begin < old.end;
    if (overlap && !known && (old.writes || writes))
      races_.push_back(
          std::string(block->owner == kHost ? "pinned memory" : "race") + ": " + told(*launch) +
          (writes ? " writes" : " reads") + " what " + told(*old.launch) + (old.writes ? " writes" : " reads") +
          ", and nothing makes the one wait for the other");
    // Whoever will know of this access knows of an old one that it knew of; and only a write stands for a write.
    bool covered = now.begin <= old.begin && old.end <= now.end;
    if (!(known && covered && (writes || !old.writes)))
      kept.push_back(old);
  }
  kept.push_back(now);
  block->accesses = std::move(kept);
}

void Model::host_touches(
    const void* address, size_t bytes, bool writes, const std::string& what, const std::string& where) {
  Lock lock(mutex_);
  touch(address, bytes, writes, std::make_shared<Launch>(Launch{kHost, clock(kHost).advance(kHost), what, where}));
}

bool Model::is_pinned(const void* address) {
  Lock lock(mutex_);
  Block* block = find(address);
  return block && block->owner == kHost;
}

bool Model::has_pinned() {
  Lock lock(mutex_);
  return pinned_ > 0;
}

// Findings.

std::vector<std::string> Model::races() {
  Lock lock(mutex_);
  return races_;
}

std::vector<std::string> Model::early_frees() {
  Lock lock(mutex_);
  return early_frees_;
}

std::vector<Wait> Model::waits() {
  Lock lock(mutex_);
  return waits_;
}

std::vector<std::string> Model::launches() {
  Lock lock(mutex_);
  return launches_;
}

void Model::reset() {
  Lock lock(mutex_);
  races_.clear();
  early_frees_.clear();
  waits_.clear();
  launches_.clear();
  failure_.reset();
  for (auto& [start, block] : blocks_)
    block->accesses.clear();
  for (auto& [owner, blocks] : unsettled_)
    for (Block* block : blocks)
      block->accesses.clear();
  unsettled_.clear();
}

void Model::fail(const std::string& message) {
  Lock lock(mutex_);
  if (!failure_)
    failure_ = message;
}

std::optional<std::string> Model::failure() {
  Lock lock(mutex_);
  return failure_;
}

} // namespace sim
