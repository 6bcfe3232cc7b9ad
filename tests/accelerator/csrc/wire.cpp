#include "wire.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "model.h"

namespace sim {

struct Wire::Header {
  int64_t bytes;
  int64_t broken; // the rank gave up, and `what` is why
  char what[1008];
};

at::Tensor Wire::header(const std::string& what, const at::Tensor& payload, bool broken) {
  at::Tensor bytes = at::empty({int64_t(sizeof(Header))}, at::kByte);
  auto* header = static_cast<Header*>(bytes.mutable_data_ptr());
  *header = {payload.defined() ? int64_t(payload.nbytes()) : 0, broken, {}};
  std::strncpy(header->what, what.c_str(), sizeof(header->what) - 1);
  return bytes;
}

void Wire::post(const at::Tensor& bytes, int rank, Lane lane) {
  std::vector<at::Tensor> message{bytes};
  posted_.emplace_back(bytes, gloo_->send(message, rank, tag(lane)));
}

void Wire::take(at::Tensor bytes, int rank, Lane lane, std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> message{std::move(bytes)};
  gloo_->recv(message, rank, tag(lane))->wait(timeout);
}

// Tells every other rank, too: some of them may wait for this one in collectives of which the culprits know nothing.
bool Wire::fail(const std::string& message) {
  model().fail(message);
  for (int rank = 0; rank < gloo_->getSize(); rank++)
    try {
      if (rank != gloo_->getRank())
        post(header(message, {}, true), rank, kCollective);
    } catch (const std::exception&) {
      // gloo has closed the connection to a rank that did not answer: this world is over
    }
  return false;
}

bool Wire::same(const std::string& what, const Parcel& parcel, Lane lane, std::chrono::milliseconds timeout) {
  at::Tensor bytes = at::empty({int64_t(sizeof(Header))}, at::kByte);
  std::string mine = "rank " + std::to_string(gloo_->getRank()) + " launches " + what;
  std::string theirs = "rank " + std::to_string(parcel.rank);
  try {
    take(bytes, parcel.rank, lane, timeout);
  } catch (const std::exception& error) {
    const auto& last = last_[parcel.rank];
    return fail(
        "collective without its peer: " + mine + ", and " + theirs + " does not join within " +
        std::to_string(timeout.count()) + " ms; " +
        (last.empty() ? "it has launched nothing" : "the last that it launched is " + last));
  }
  const auto* header = static_cast<const Header*>(bytes.const_data_ptr());
  if (header->broken) {
    model().fail(header->what);
    return false;
  }
  last_[parcel.rank] = header->what;
  if (what != header->what)
    return fail("collectives differ: " + mine + ", and " + theirs + " launches " + header->what);
  int64_t room = parcel.from.defined() ? int64_t(parcel.from.nbytes()) : 0;
  if (room != header->bytes)
    return fail(
        "collectives differ: " + mine + " and expects " + std::to_string(room) + " bytes from " + theirs +
        ", which sends " + std::to_string(header->bytes));
  return true;
}

bool Wire::meet(const std::string& what, std::vector<Parcel>& parcels, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t before = posted_.size();
  for (auto& parcel : parcels)
    post(header(what, parcel.to, false), parcel.rank, kCollective);
  for (auto& parcel : parcels)
    if (!same(what, parcel, kCollective, timeout))
      return false;
  for (auto& parcel : parcels)
    if (parcel.to.defined() && parcel.to.nbytes())
      post(parcel.to, parcel.rank, kCollective);
  try {
    for (auto& parcel : parcels)
      if (parcel.from.defined() && parcel.from.nbytes())
        take(parcel.from, parcel.rank, kCollective, timeout);
    for (size_t i = before; i < posted_.size(); i++)
      posted_[i].second->wait(timeout);
  } catch (const std::exception& error) {
    return fail("collective broken off: " + what + ": " + error.what());
  }
  posted_.resize(before);
  return true;
}

bool Wire::meet_all(const std::string& what, std::chrono::milliseconds timeout) {
  std::vector<Parcel> parcels;
  for (int rank = 0; rank < gloo_->getSize(); rank++)
    if (rank != gloo_->getRank())
      parcels.push_back({rank, {}, {}});
  return meet(what, parcels, timeout);
}

int64_t Wire::number(const std::string& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  return numbers_[group]++;
}

void Wire::renew() {
  std::lock_guard<std::mutex> lock(mutex_);
  epoch_++;
  last_.clear();
  numbers_.clear();
}

} // namespace sim
