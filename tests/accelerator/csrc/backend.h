// A backend of c10d that keeps NCCL's promises: a stream of its own, launches in order, futures with devices, a host that
// does not wait, errors that come later.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

#include "model.h"
#include "wire.h"

namespace sim {

class SimNccl final : public c10d::Backend {
 public:
  // `ranks` are those of the group, counted in the world of the wire.
  SimNccl(
      std::shared_ptr<Wire> wire, std::string group, std::vector<int> ranks, int rank, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override {
    return "nccl"; // which the package is to take it for
  }
  c10::intrusive_ptr<Options> getBackendOptions() {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return launches_;
  }

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Call;
  WorkPtr run(const Call& call);
  WorkPtr coalesce(size_t count, const std::function<void(size_t)>& launch_one);
  WorkPtr launch(
      const std::string& what, const Tensors& reads, const Tensors& writes, bool async, int64_t stream,
      const std::function<void()>& move, bool blocks_host = false);

  std::shared_ptr<Wire> wire_;
  std::string group_;
  std::vector<int> ranks_;
  c10::intrusive_ptr<Options> options_;
  int64_t stream_ = model().stream_of_its_own();
  Clock order_; // NCCL runs what is launched on one communicator in order, whatever the streams
  uint64_t launches_ = 0;
  bool coalescing_ = false;
  Tensors coalesced_;
};

} // namespace sim
