#include "backend.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <Python.h>

#include "device.h"

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;

std::string told(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), tensor.sizes());
}

std::string told(const Tensors& tensors) {
  std::string all;
  for (auto& tensor : tensors)
    all += (all.empty() ? "" : ", ") + told(tensor);
  return all;
}

std::string told(const c10d::ReduceOp& op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return names[op.op_];
}

// ProcessGroupNCCL.cpp: check_gpu_single_tensor, getNcclDataType, getNcclReduceOp.
void check(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      on_sim(tensor) && !tensor.is_sparse(), "Tensors must be CUDA and dense, got ", tensor.device(), ", ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK_TYPE(
      tensor.scalar_type() != at::kShort && !tensor.is_complex(),
      "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
}

void check(const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::MAX, "Cannot use this ReduceOp with NCCL, or not in simulation: ", told(op));
}

// Parts of all ranks, in the order of the ranks, in the type that travels: the same bits on every rank.
at::Tensor reduced(const Tensors& parts, const c10d::ReduceOp& op) {
  at::Tensor total = parts[0].clone();
  for (size_t rank = 1; rank < parts.size(); rank++) {
    const at::Tensor& part = parts[rank];
    if (op.op_ == c10d::ReduceOp::PRODUCT)
      total.mul_(part);
    else if (op.op_ == c10d::ReduceOp::MIN)
      total = at::minimum(total, part);
    else if (op.op_ == c10d::ReduceOp::MAX || part.scalar_type() == at::kBool)
      total = at::maximum(total, part);
    else
      total.add_(part);
  }
  if (op.op_ == c10d::ReduceOp::AVG)
    at::isIntegralType(total.scalar_type(), true) ? total.floor_divide_(int64_t(parts.size()))
                                                  : total.div_(int64_t(parts.size()));
  return total;
}

class SimWork final : public c10d::Work {
 public:
  SimWork(Clock done, Tensors reads, Tensors writes, int64_t stream, bool async, bool blocks_host)
      : done_(std::move(done)), writes_(std::move(writes)), stream_(stream), blocks_host_(blocks_host) {
    if (async) {
      kept_ = std::move(reads);
      kept_.insert(kept_.end(), writes_.begin(), writes_.end());
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kSim, 0)});
    c10::StreamGuard on(stream_of(stream));
    if (auto failure = model().failure())
      future_->setError(std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, *failure)));
    else
      future_->markCompleted(c10::IValue(writes_));
  }

  // NCCL holds the tensors until somebody waits, or until its watchdog sees the end.
  ~SimWork() override {
    for (auto& tensor : kept_)
      model().record_stream(tensor.storage().data(), stream_);
  }

  bool isCompleted() override {
    model().host_knows(done_);
    return true;
  }
  bool isSuccess() const override {
    return !model().failure();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (blocks_host_)
      host_waits("barrier");
    raise_failure();
    return true;
  }
  void synchronize() override {
    model().wait(current_stream(), done_);
    kept_.clear();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  std::vector<at::Tensor> result() override {
    return writes_;
  }

 private:
  Clock done_;
  Tensors kept_, writes_;
  int64_t stream_;
  bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor host_copy(const at::Tensor& tensor) {
  return on_host(tensor).contiguous().clone();
}

// A thread with the interpreter's lock must not wait for other ranks, one of whose threads may need it here.
struct WithoutInterpreter {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutInterpreter() {
    if (state)
      PyEval_RestoreThread(state);
  }
};

} // namespace

// A collective as one rank sees it: what it reads and writes here, the bytes for and from each rank of the group, and what is
// made of them. Bytes from this rank itself are those that it sends to itself.
struct SimNccl::Call {
  std::string what;
  Tensors reads, writes;
  bool async;
  std::vector<at::Tensor> to, from; // per rank of the group, in memory of the host; undefined for nothing
  std::function<void()> finish = [] {};
  bool blocks_host = false;
};

SimNccl::SimNccl(
    std::shared_ptr<Wire> wire, std::string group, std::vector<int> ranks, int rank, std::chrono::milliseconds timeout)
    : c10d::Backend(rank, int(ranks.size())),
      wire_(std::move(wire)),
      group_(std::move(group)),
      ranks_(std::move(ranks)),
      options_(c10::make_intrusive<Options>("nccl", timeout)) {}

SimNccl::WorkPtr SimNccl::launch(
    const std::string& what, const Tensors& reads, const Tensors& writes, bool async, int64_t stream,
    const std::function<void()>& move, bool blocks_host) {
  for (auto* tensors : {&reads, &writes})
    for (auto& tensor : *tensors)
      check(tensor);
  raise_failure();
  int64_t on = async ? stream : current_stream();
  model().wait(on, model().record(current_stream()));
  if (stream == stream_)
    model().wait(on, order_);
  auto launch = model().launch(on, "nccl:" + what.substr(0, what.find(' ')), where());
  for (auto& tensor : reads)
    touch(tensor, false, launch);
  for (auto& tensor : writes)
    touch(tensor, true, launch);
  {
    WithoutInterpreter unlocked;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    move();
  }
  Clock done = model().record(on);
  if (stream == stream_)
    order_ = done;
  if (coalescing_)
    for (auto* tensors : {&reads, &writes})
      coalesced_.insert(coalesced_.end(), tensors->begin(), tensors->end());
  return c10::make_intrusive<SimWork>(done, reads, writes, on, async, blocks_host);
}

SimNccl::WorkPtr SimNccl::run(const Call& call) {
  auto move = [&] {
    std::vector<Parcel> parcels;
    for (int rank = 0; rank < size_; rank++)
      if (rank != rank_)
        parcels.push_back({ranks_[rank], call.to[rank], call.from[rank]});
    if (call.from[rank_].defined())
      call.from[rank_].copy_(call.to[rank_]);
    launches_++;
    std::string what = call.what + ", number " + std::to_string(wire_->number(group_)) + " of group " + group_ +
        " of ranks " + c10::str(ranks_);
    if (wire_->meet(what, parcels, options_->timeout))
      call.finish();
  };
  return launch(call.what, call.reads, call.writes, call.async, stream_, move, call.blocks_host);
}

void SimNccl::startCoalescing() {
  coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> SimNccl::endCoalescing() {
  coalescing_ = false;
  Tensors tensors = std::move(coalesced_);
  coalesced_.clear();
  return c10::make_intrusive<SimWork>(order_, Tensors{}, tensors, stream_, true, false);
}

SimNccl::WorkPtr SimNccl::coalesce(size_t count, const std::function<void(size_t)>& launch_one) {
  startCoalescing();
  try {
    for (size_t i = 0; i < count; i++)
      launch_one(i);
  } catch (...) {
    coalescing_ = false;
    coalesced_.clear();
    throw;
  }
  return endCoalescing();
}

// Reductions.

SimNccl::WorkPtr SimNccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return coalesce(tensors.size(), [&](size_t i) {
    Tensors one{tensors[i]};
    allreduce(one, options);
  });
}

SimNccl::WorkPtr SimNccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check(options.reduceOp);
  check(tensors[0]);
  at::Tensor mine = host_copy(tensors[0]), target = on_host(tensors[0]);
  Tensors from;
  for (int rank = 0; rank < size_; rank++)
    from.push_back(at::empty_like(mine));
  return run(
      {"all_reduce " + told(tensors) + " " + told(options.reduceOp), tensors, tensors, options.asyncOp,
       Tensors(size_, mine), from, [=] { target.copy_(reduced(from, options.reduceOp)); }});
}

SimNccl::WorkPtr SimNccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check(options.reduceOp);
  check(tensors[0]);
  at::Tensor mine = host_copy(tensors[0]), target = on_host(tensors[0]);
  Tensors to(size_), from(size_);
  to[options.rootRank] = mine;
  std::function<void()> finish = [] {};
  if (rank_ == options.rootRank) {
    for (auto& part : from)
      part = at::empty_like(mine);
    finish = [=] { target.copy_(reduced(from, options.reduceOp)); };
  }
  std::string root = " to rank " + std::to_string(options.rootRank);
  return run(
      {"reduce " + told(tensors) + " " + told(options.reduceOp) + root, tensors,
       rank_ == options.rootRank ? tensors : Tensors{}, options.asyncOp, to, from, finish});
}

SimNccl::WorkPtr SimNccl::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  check(options.reduceOp);
  Tensors to, from;
  for (auto& input : inputs[0]) {
    check(input);
    to.push_back(host_copy(input));
    from.push_back(at::empty_like(on_host(outputs[0])));
  }
  at::Tensor target = on_host(outputs[0]);
  return run(
      {"reduce_scatter " + told(inputs[0]) + " " + told(options.reduceOp), inputs[0], outputs, options.asyncOp, to,
       from, [=] { target.copy_(reduced(from, options.reduceOp)); }});
}

SimNccl::WorkPtr SimNccl::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
  Tensors outputs{output.view(-1)};
  std::vector<Tensors> inputs{input.view({size_, -1}).unbind()};
  return reduce_scatter(outputs, inputs, options);
}

SimNccl::WorkPtr SimNccl::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return coalesce(inputs.size(), [&](size_t i) { _reduce_scatter_base(outputs[i], inputs[i], options); });
}

// Copies from rank to rank.

SimNccl::WorkPtr SimNccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check(tensors[0]);
  const bool root = rank_ == options.rootRank;
  at::Tensor mine = host_copy(tensors[0]), target = on_host(tensors[0]);
  Tensors to(size_), from(size_);
  if (root)
    to.assign(size_, mine);
  else
    from[options.rootRank] = mine;
  return run(
      {"broadcast " + told(tensors) + " from rank " + std::to_string(options.rootRank), root ? tensors : Tensors{},
       root ? Tensors{} : tensors, options.asyncOp, to, from, [=] { target.copy_(mine); }});
}

SimNccl::WorkPtr SimNccl::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check(inputs[0]);
  Tensors from, targets;
  for (auto& output : outputs[0]) {
    check(output);
    targets.push_back(on_host(output));
    from.push_back(at::empty(output.sizes(), targets.back().options()));
  }
  return run(
      {"all_gather " + told(outputs[0]), inputs, outputs[0], options.asyncOp, Tensors(size_, host_copy(inputs[0])),
       from, [=] {
         for (size_t rank = 0; rank < from.size(); rank++)
           targets[rank].copy_(from[rank]);
       }});
}

SimNccl::WorkPtr SimNccl::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
  std::vector<Tensors> outputs{output.view({size_, -1}).unbind()};
  Tensors inputs{input.view(-1)};
  return allgather(outputs, inputs, options);
}

SimNccl::WorkPtr SimNccl::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return coalesce(inputs.size(), [&](size_t i) { _allgather_base(outputs[i], inputs[i], options); });
}

SimNccl::WorkPtr SimNccl::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  check(inputs[0]);
  const bool root = rank_ == options.rootRank;
  Tensors to(size_), from(size_), targets, writes;
  to[options.rootRank] = host_copy(inputs[0]);
  if (root)
    for (int rank = 0; rank < size_; rank++) {
      writes.push_back(outputs[0][rank]);
      targets.push_back(on_host(outputs[0][rank]));
      from[rank] = at::empty(outputs[0][rank].sizes(), targets.back().options());
    }
  return run(
      {"gather " + told(inputs) + " to rank " + std::to_string(options.rootRank), inputs, writes, options.asyncOp, to,
       from, [=] {
         for (size_t rank = 0; rank < targets.size(); rank++)
           targets[rank].copy_(from[rank]);
       }});
}

SimNccl::WorkPtr SimNccl::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  check(outputs[0]);
  const bool root = rank_ == options.rootRank;
  Tensors to(size_), from(size_);
  at::Tensor target = on_host(outputs[0]), mine = at::empty(outputs[0].sizes(), target.options());
  from[options.rootRank] = mine;
  if (root)
    for (int rank = 0; rank < size_; rank++)
      to[rank] = host_copy(inputs[0][rank]);
  return run(
      {"scatter " + told(outputs) + " from rank " + std::to_string(options.rootRank), root ? inputs[0] : Tensors{}, outputs,
       options.asyncOp, to, from, [=] { target.copy_(mine); }});
}

SimNccl::WorkPtr SimNccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Tensors to, from, targets;
  for (int rank = 0; rank < size_; rank++) {
    check(inputs[rank]);
    check(outputs[rank]);
    to.push_back(host_copy(inputs[rank]));
    targets.push_back(on_host(outputs[rank]));
    from.push_back(at::empty(outputs[rank].sizes(), targets.back().options()));
  }
  // How much each pair moves may differ; the wire compares it.
  return run(
      {c10::str("all_to_all ", inputs[0].scalar_type()), inputs, outputs, options.asyncOp, to, from, [=] {
         for (size_t rank = 0; rank < from.size(); rank++)
           targets[rank].copy_(from[rank]);
       }});
}

SimNccl::WorkPtr SimNccl::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  auto rows = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    return tensor.split_with_sizes(splits.empty() ? std::vector<int64_t>(size_, tensor.size(0) / size_) : splits);
  };
  Tensors outputs = rows(output, output_splits), inputs = rows(input, input_splits);
  return alltoall(outputs, inputs, options);
}

SimNccl::WorkPtr SimNccl::barrier(const c10d::BarrierOptions& options) {
  return run({"barrier", {}, {}, false, Tensors(size_), Tensors(size_), [] {}, true});
}

// DDP's timers.

// DDP warns about devices for which it has none. Nothing here has a duration: these are the host's times.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to && *to >= *from ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

} // namespace sim

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, sim::Timer)

} // namespace c10d
