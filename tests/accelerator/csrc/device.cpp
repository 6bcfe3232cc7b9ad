// Device, streams, events, memory and random numbers, as c10 asks for them.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace sim {

namespace {

thread_local int64_t current = 0;

const c10::Device kDevice(kSim, 0);

struct Event {
  Clock clock;
  int queries = 0;
};

} // namespace

int& event_delay() {
  static int queries = 0;
  return queries;
}

c10::Stream stream_of(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

int64_t current_stream() {
  return current;
}

LaunchPtr launched(const std::string& what) {
  return model().launch(current, what, where());
}

void touch(const at::Tensor& tensor, bool writes, const LaunchPtr& launch) {
  if (!tensor.defined() || tensor.layout() == at::kSparse) {
    if (tensor.defined()) {
      touch(tensor._indices(), writes, launch);
      touch(tensor._values(), writes, launch);
    }
    return;
  }
  if (!tensor.numel())
    return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  model().touch(tensor.const_data_ptr(), (last + 1) * tensor.element_size(), writes, launch);
}

void raise_failure() {
  if (auto failure = model().failure())
    C10_THROW_ERROR(DistBackendError, *failure);
}

void host_waits(const std::string& what) {
  model().host_waits(model().record(current), what, where());
  raise_failure();
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!on_sim(tensor))
    return tensor;
  if (tensor.is_sparse())
    return at::_sparse_coo_tensor_unsafe(
        on_host(tensor._indices()), on_host(tensor._values()), tensor.sizes(), std::nullopt, std::nullopt, std::nullopt,
        std::nullopt, tensor.is_coalesced());
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

// Streams and events.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated device per process, sim:0, got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return stream_of(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_of(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(model().stream_of_pool());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(model().stream_of_pool());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    model().host_knows(model().record(stream.id()));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    model().host_waits(model().record(stream.id()), "stream.synchronize", where());
    raise_failure();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    model().host_waits(model().everything(), "device.synchronize", where());
    raise_failure();
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event)
      *event = new Event;
    *static_cast<Event*>(*event) = {model().record(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event)
      model().wait(stream.id(), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* one = static_cast<Event*>(event);
    if (one && one->queries++ < event_delay())
      return false;
    if (one)
      model().host_knows(one->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event)
      model().host_waits(static_cast<Event*>(event)->clock, "event.synchronize", where());
    raise_failure();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override {
    return 0.0; // nothing here has a duration
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    model().record_stream(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory.

namespace {

void give_back(void* start) {
  if (model().free(start))
    model().name_free(start, where());
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (model().unsettled(current))
      model().settle(current, where());
    void* start = model().allocate(bytes, current);
    return {start, start, &give_back, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = model().allocate_pinned(bytes);
    return {start, start, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator one;
  return &one;
}

REGISTER_ALLOCATOR(kSim, device_allocator())

// Random numbers.

namespace {

// Has its own state, and the CPU's algorithm: `inner` is what the operators of the CPU are given.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();

  Generator() : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the simulated device's generator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the simulated device's generator has no offset");
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator;
    copy->inner = inner.clone();
    return copy;
  }
};

} // namespace

at::Generator host_generator(const at::Generator& generator) {
  return generator.device().type() == kSim ? static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner
                                           : generator;
}

at::Generator default_generator() {
  static auto* one = new at::Generator(at::make_generator<Generator>());
  return *one;
}

// The hooks of the accelerator.

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index <= 0, "there is one simulated device per process, sim:0, got index ", int(index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator one;
    return &one;
  }
  bool isPinnedPtr(const void* address) const override {
    return model().is_pinned(address);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* one = new at::Generator(default_generator());
    return *one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = bytes ? device_allocator()->allocate(bytes) : c10::DataPtr(nullptr, kDevice);
    if (size_t kept = std::min(bytes, storage.nbytes())) {
      auto launch = launched("resize_storage");
      model().touch(storage.data(), kept, false, launch);
      model().touch(fresh.get(), kept, true, launch);
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() {
    static auto* hooks = new Hooks;
    at::RegisterPrivateUse1HooksInterface(hooks);
  }
} register_hooks;

} // namespace

} // namespace sim
