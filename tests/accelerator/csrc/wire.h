// What ranks tell each other, so that a collective that the others do not join is an error instead of a hang.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// The bytes between this rank and one other; an undefined tensor is none.
struct Parcel {
  int rank;
  at::Tensor to;
  at::Tensor from;
};

// Messages between the ranks of the world, over gloo. Every pair of ranks compares what each of them launches next, whatever
// group it belongs to: two ranks must launch the collectives that both take part in, in the same order. NCCL hangs otherwise,
// or asks for trouble ("Using multiple NCCL communicators concurrently" in its documentation).
class Wire {
 public:
  explicit Wire(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  // Moves the parcels of one collective. False, with the reason in the model, if the ranks disagree.
  bool meet(const std::string& what, std::vector<Parcel>& parcels, std::chrono::milliseconds timeout);

  // All ranks of the world come here, and none of them has launched what the others do not know of.
  bool meet_all(const std::string& what, std::chrono::milliseconds timeout);

  // How many collectives of a group came before on this rank.
  int64_t number(const std::string& group);

  // Forgets messages that were never received, and counts anew. Every rank calls it equally often.
  void renew();

 private:
  enum Lane : int { kCollective, kMessage, kLanes };
  struct Header;

  int tag(Lane lane) const {
    return epoch_ * kLanes + lane;
  }
  at::Tensor header(const std::string& what, const at::Tensor& payload, bool broken);
  void post(const at::Tensor& bytes, int rank, Lane lane);
  void take(at::Tensor bytes, int rank, Lane lane, std::chrono::milliseconds timeout);
  bool same(const std::string& what, const Parcel& parcel, Lane lane, std::chrono::milliseconds timeout);
  bool fail(const std::string& message);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  int epoch_ = 0;
  std::map<int, std::string> last_; // what each rank launched last, as far as this one heard
  std::map<std::string, int64_t> numbers_;
  std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>> posted_; // gloo reads them until they are received
};

} // namespace sim
