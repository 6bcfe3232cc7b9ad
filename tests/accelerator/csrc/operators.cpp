// Every operator of the device: its reads and writes are noted, and the CPU computes it in place.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// Memory and views.

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t elements = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

// Contents are kept only where the storage is large enough; nothing here needs more.
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

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (self.is_sparse()) {
    model().record_stream(self._indices().const_data_ptr(), stream.id());
    model().record_stream(self._values().const_data_ptr(), stream.id());
  } else {
    model().record_stream(self.storage().data(), stream.id());
  }
}

// Copies, and what the host waits for.

// While the CPU computes for the device, its operators are not the host's.
thread_local bool computing = false;

struct Computing {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  bool outer = std::exchange(computing, true);
  ~Computing() {
    computing = outer;
  }
};

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  bool from_host = !on_sim(self), to_host = !on_sim(to);
  auto launch = launched(from_host ? "copy to the device" : to_host ? "copy to the host" : "copy");
  touch(self, false, launch);
  touch(to, true, launch);
  {
    Computing now;
    on_host(to).copy_(on_host(self));
  }
  // To memory that is not pinned, the host waits whatever it is asked; from there, the driver takes the bytes at once.
  bool at_once = non_blocking && (from_host || model().is_pinned(to.const_data_ptr()));
  if ((from_host || to_host) && !at_once)
    host_waits(launch->what);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
  auto launch = launched("item");
  touch(self, false, launch);
  host_waits("item");
  Computing now;
  return at::_local_scalar_dense(on_host(self));
}

// Operators whose result's size or value the host must know before it can go on.
bool waits(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  if (name == "aten::index") // torch has turned masks into indices, with a `nonzero` of its own
    return false;
  if (name == "aten::copy_") // of sparse tensors; `copy_from` has the others
    return !on_sim(stack[first].toTensor()) || !on_sim(stack[first + 1].toTensor());
  if (name == "aten::_index_put_impl_")
    for (const std::optional<at::Tensor>& index : stack[first + 1].toOptionalTensorVector())
      if (index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
        return true;
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      name == "aten::_coalesce";
}

// The one kernel of all other operators.

// Calls `what` with each tensor of an argument or result, and takes its answer in the tensor's place.
template <class What>
void for_each_tensor(IValue& value, What what) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      value = what(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    c10::List<at::Tensor> fresh;
    for (const at::Tensor& tensor : list)
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
  if (host.is_sparse())
    return at::_sparse_coo_tensor_unsafe(
        to_sim(host._indices()), to_sim(host._values()), host.sizes(), std::nullopt, std::nullopt, std::nullopt,
        std::nullopt, host.is_coalesced());
  at::Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  at::Tensor fresh = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(c10::Device(kSim, 0)));
  if (dense.numel())
    std::memcpy(fresh.mutable_data_ptr(), dense.const_data_ptr(), dense.numel() * dense.element_size());
  return fresh;
}

// Has `self` hold what the CPU left in `host`, which shares its memory unless the operator gave it other.
void take_back(const at::Tensor& self, const at::Tensor& host) {
  if (self.is_sparse()) {
    auto* implementation = static_cast<at::SparseTensorImpl*>(self.unsafeGetTensorImpl());
    at::Tensor fresh = to_sim(host);
    implementation->raw_resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
    implementation->set_indices_and_values_unsafe(fresh._indices(), fresh._values());
    implementation->set_coalesced(host.is_coalesced());
  } else if (host.const_data_ptr() != self.const_data_ptr() || host.sizes() != self.sizes()) { // (0, 5) has no memory either
    self.resize_(host.sizes());
    on_host(self).copy_(host);
  }
}

// The random numbers of the device come from its own generator, whether an operator is handed it or not.
struct RandomNumbers {
  at::Generator mine = host_generator(default_generator());
  at::Generator cpus = at::detail::getDefaultCPUGenerator();
  c10::intrusive_ptr<c10::TensorImpl> kept = cpus.unsafeGetGeneratorImpl()->get_state();
  RandomNumbers() {
    cpus.unsafeGetGeneratorImpl()->set_state(*mine.unsafeGetGeneratorImpl()->get_state());
  }
  ~RandomNumbers() {
    mine.unsafeGetGeneratorImpl()->set_state(*cpus.unsafeGetGeneratorImpl()->get_state());
    cpus.unsafeGetGeneratorImpl()->set_state(*kept);
  }
};

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

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const size_t first = stack->size() - arguments.size();
  auto written = [](const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  };

  TORCH_CHECK(
      schema.name().rfind("c10d::", 0), "NCCL does not support ", schema.name(), " with sparse tensors. Please use dense"
      " tensors instead.");
  check_devices(op, *stack, first);
  auto launch = launched(schema.name());
  const bool must_wait = waits(op, *stack, first);
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> changed; // ours, and the CPU's view of it
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue& value = (*stack)[first + i];
    const bool writes = written(arguments[i]);
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!on_sim(tensor))
        return tensor;
      touch(tensor, writes, launch);
      // A result of size 0 is one that the operator makes as large as it needs.
      bool to_be_sized = writes && !tensor.is_sparse() && !tensor.numel();
      at::Tensor host = to_be_sized ? at::empty(tensor.sizes(), on_host(tensor).options()) : on_host(tensor);
      if (writes)
        changed.emplace_back(tensor, host);
      return host;
    });
    if (value.isDevice() && value.toDevice().type() == kSim)
      value = c10::Device(c10::kCPU);
    else if (value.isGenerator())
      value = host_generator(value.toGenerator());
  }
  {
    Computing now;
    std::optional<RandomNumbers> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded))
      random.emplace();
    op.callBoxed(stack);
  }
  for (auto& [ours, host] : changed)
    take_back(ours, host);

  for (size_t i = 0; i < returns.size(); i++) {
    IValue& value = (*stack)[stack->size() - returns.size() + i];
    const auto* alias = returns[i].alias_info();
    if (!alias) {
      for_each_tensor(value, [&](const at::Tensor& host) {
        at::Tensor fresh = to_sim(host);
        touch(fresh, true, launch);
        return fresh;
      });
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "the simulated device lacks the view ", schema.operator_name());
    for (size_t k = 0; k < arguments.size(); k++)
      if (arguments[k].alias_info() && arguments[k].alias_info()->beforeSets() == alias->beforeSets())
        value = given[k];
  }
  if (must_wait)
    host_waits(schema.name());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  // CUDA has kernels of its own for these; without ours, torch would take them apart, and more launches be counted.
  auto kernel = [] { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); };
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm"})
    m.impl(name, kernel());
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl(toString(op).c_str(), kernel());
}

// What the host does with pinned memory.

// Operators of the CPU that read or write pinned memory. Those without a kernel of the CPU call others that have one;
// `copy_` and `resolve_conj`, by which `tolist` begins, are the exceptions.
bool uses_memory(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || name == "aten::copy_" || name == "aten::resolve_conj";
}

std::unique_ptr<at::ObserverContext> note_pinned(const at::RecordFunction& function) {
  if (computing || !model().has_pinned())
    return nullptr;
  auto inputs = function.inputs();
  auto handle = function.operator_name()
      ? c10::Dispatcher::singleton().findSchema(*function.operator_name())
      : std::nullopt;
  if (!handle || !uses_memory(*handle))
    return nullptr;
  const auto& schema = handle->schema();
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite() && schema.name() != "aten::resolve_conj")
      return nullptr; // a view
  for (const auto& value : inputs)
    if (value.isTensor() && on_sim(value.toTensor()))
      return nullptr; // a copy between host and device, noted there
  for (size_t i = 0; i < std::min(inputs.size(), schema.arguments().size()); i++) {
    if (!inputs[i].isTensor() || !inputs[i].toTensor().defined() || !inputs[i].toTensor().is_cpu())
      continue;
    const at::Tensor& tensor = inputs[i].toTensor();
    if (!tensor.has_storage() || !tensor.numel() || !model().is_pinned(tensor.const_data_ptr()))
      continue;
    const auto* alias = schema.arguments()[i].alias_info();
    model().host_touches(
        tensor.const_data_ptr(), tensor.numel() * tensor.element_size(), alias && alias->isWrite(), schema.name(),
        where());
  }
  return nullptr;
}

auto pinned_observer = at::addGlobalCallback(
    at::RecordFunctionCallback(&note_pinned).needsInputs(true).scopes({at::RecordScope::FUNCTION}));

} // namespace

} // namespace sim

namespace at::native {

// Attention of separate operators: the fused ones are CUDA's.
int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

} // namespace at::native
