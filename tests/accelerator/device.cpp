// The device `sim`: its memory is the CPU's, the CPU computes every operator in place, and what makes the host wait is told.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pybind11/functional.h>

#include <mutex>
#include <set>

namespace sim {

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kSim, 0);

// Never destroyed: at the end of the process there is no Python to do so.
auto& waited = *new std::function<void(const std::string&)>([](const std::string&) {});

void host_waits(const std::string& what) {
  waited(what);
}

bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// The same memory, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!on_sim(tensor))
    return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

// Streams and events: everything is over at once, so they need only their names.

thread_local int64_t current = 0;
std::atomic<int64_t> streams{1};

c10::Stream stream_of(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated device per process, sim:0, got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(streams++); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(streams++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { host_waits("stream.synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { host_waits("device.synchronize"); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    static char any;
    *event = &any;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { host_waits("event.synchronize"); }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory. Fresh memory of the device is NaN, or the like.

struct Memory final : c10::Allocator {
  explicit Memory(c10::Device device) : device_(device) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* start = ::operator new(bytes ? bytes : 1);
    std::memset(start, 0xff, bytes);
    return {start, start, raw_deleter(), device_};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* start) { ::operator delete(start); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  c10::Device device_;
};

c10::Allocator* device_memory() {
  static Memory one(kDevice);
  return &one;
}

REGISTER_ALLOCATOR(kSim, device_memory())

std::mutex pinning;
std::set<const void*> pinned; // where the pieces start: nothing here pins a part of one

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = ::operator new(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(pinning);
    pinned.insert(start);
    return {start, start, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* start) {
      std::lock_guard<std::mutex> lock(pinning);
      pinned.erase(start);
      ::operator delete(start);
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinning);
  return pinned.count(address);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned one;
    return &one;
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = bytes ? device_memory()->allocate(bytes) : c10::DataPtr(nullptr, kDevice);
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// Operators.

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* implementation = self.unsafeGetTensorImpl();
  size_t bytes = c10::multiply_integers(size) * self.element_size();
  if (self.storage().nbytes() < self.storage_offset() * self.element_size() + bytes) {
    implementation->set_storage_keep_dtype(at::empty(size, self.options()).storage());
    implementation->set_storage_offset(0);
  }
  implementation->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(source.storage());
  implementation->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  bool from_host = !on_sim(self), to_host = !on_sim(to);
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    on_host(to).copy_(on_host(self));
  }
  // To memory that is not pinned, the host waits whatever it is asked; from there, the driver takes the bytes at once.
  bool at_once = non_blocking && (from_host || is_pinned(to.storage().data()));
  if ((from_host || to_host) && !at_once)
    host_waits(from_host ? "copy to the device" : "copy to the host");
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
  host_waits("item");
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  return at::_local_scalar_dense(on_host(self));
}

// Operators whose result's size or value the host must know before it can go on.
bool waits(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  if (name == "aten::index") // torch has turned masks into indices, with a `nonzero` of its own
    return false;
  if (name == "aten::_index_put_impl_")
    for (const std::optional<at::Tensor>& index : stack[first + 1].toOptionalTensorVector())
      if (index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
        return true;
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

// Calls `what` with each tensor of an argument or result, and takes its answer in the tensor's place.
template <class What>
void for_each_tensor(IValue& value, What what) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      value = what(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> fresh;
    for (const at::Tensor& tensor : value.toTensorVector())
      fresh.push_back(tensor.defined() ? what(tensor) : tensor);
    value = fresh;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> fresh;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      fresh.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(what(*tensor)) : tensor);
    value = fresh;
  }
}

// The CPU's result, in memory of the device.
at::Tensor to_sim(const at::Tensor& host) {
  at::Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  at::Tensor fresh = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(kDevice));
  if (dense.numel())
    std::memcpy(fresh.mutable_data_ptr(), dense.const_data_ptr(), dense.numel() * dense.element_size());
  return fresh;
}

// As on CUDA: beside tensors of the device an operator takes numbers of the host, and few take more.
void check_devices(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  for (const char* other : {"aten::copy_", "aten::index", "aten::_foreach_", "aten::_fused_"})
    if (name.rfind(other, 0) == 0)
      return;
  for (size_t i = first; i < stack.size(); i++)
    TORCH_CHECK(
        !stack[i].isTensor() || !stack[i].toTensor().defined() || on_sim(stack[i].toTensor()) ||
            !stack[i].toTensor().dim(),
        "Expected all tensors to be on the same device, but ", op.schema().arguments()[i - first].name(), " of ", name,
        " is on ", stack[i].toTensor().device(), ", and others are on the simulated device");
}

// The one kernel of all other operators.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const size_t first = stack->size() - arguments.size();

  check_devices(op, *stack, first);
  const bool must_wait = waits(op, *stack, first);
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> changed; // ours, and the CPU's view of it
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue& value = (*stack)[first + i];
    const bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!on_sim(tensor))
        return tensor;
      // A result of size 0 is one that the operator makes as large as it needs.
      at::Tensor host =
          writes && !tensor.numel() ? at::empty(tensor.sizes(), on_host(tensor).options()) : on_host(tensor);
      if (writes)
        changed.emplace_back(tensor, host);
      return host;
    });
    if (value.isDevice() && value.toDevice().type() == kSim)
      value = c10::Device(c10::kCPU);
  }
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(stack);
  }
  for (auto& [ours, host] : changed)
    if (host.const_data_ptr() != ours.const_data_ptr() || host.sizes() != ours.sizes()) {
      ours.resize_(host.sizes());
      on_host(ours).copy_(host);
    }
  for (size_t i = 0; i < returns.size(); i++) {
    IValue& value = (*stack)[stack->size() - returns.size() + i];
    const auto* alias = returns[i].alias_info();
    if (!alias) {
      for_each_tensor(value, to_sim);
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "the simulated device lacks the view ", op.schema().operator_name());
    for (size_t k = 0; k < arguments.size(); k++)
      if (arguments[k].alias_info() && arguments[k].alias_info()->beforeSets() == alias->beforeSets())
        value = given[k];
  }
  if (must_wait)
    host_waits(op.schema().name());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
}

// Collectives: gloo's, on the same memory. They are over when they were launched, and the host is not told to wait.

class Done final : public c10d::Work {
 public:
  explicit Done(Tensors written) : written_(std::move(written)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{kDevice});
    future_->markCompleted(IValue(written_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return written_; }

 private:
  Tensors written_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) {
    TORCH_CHECK(on_sim(tensor) && tensor.is_contiguous(), "NCCL takes contiguous tensors of the device");
    found.push_back(on_host(tensor));
  }
  return found;
}

class Collectives final : public c10d::Backend {
 public:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit Collectives(Gloo gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors host = on_host(tensors);
    return done(gloo_->broadcast(host, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors host = on_host(tensors);
    return done(gloo_->allreduce(host, options), tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host{on_host(outputs[0])};
    Tensors from = on_host(inputs);
    return done(gloo_->allgather(host, from, options), outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    at::Tensor to = on_host(output), from = on_host(input);
    return done(gloo_->_allgather_base(to, from, options), {output});
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    at::Tensor to = on_host(output), from = on_host(input);
    return done(gloo_->_reduce_scatter_base(to, from, options), {output});
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& options) override {
    at::Tensor to = on_host(output), from = on_host(input);
    return done(gloo_->alltoall_base(to, from, to_splits, from_splits, options), {output});
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    host_waits("barrier");
    return done(gloo_->barrier(options), {});
  }

 private:
  static WorkPtr done(const WorkPtr& work, Tensors written) {
    work->wait();
    return c10::make_intrusive<Done>(std::move(written));
  }

  Gloo gloo_;
};

// DDP warns about devices for which it has no timer.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

} // namespace

} // namespace sim

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, sim::Timer)

} // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("tell_of_waits", [](std::function<void(const std::string&)> to) { sim::waited = std::move(to); });
  py::module::import("torch._C._distributed_c10d"); // knows the base class
  py::class_<sim::Collectives, c10::intrusive_ptr<sim::Collectives>, c10d::Backend>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
