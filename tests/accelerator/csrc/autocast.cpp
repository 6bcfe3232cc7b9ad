// Autocast of the device: CUDA's own lists of operators, read from torch's header.
#include "device.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace sim {

namespace {

using Stack = torch::jit::Stack;

template <class What>
void for_each_argument(const c10::OperatorHandle& op, Stack* stack, What what) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    what(arguments[i], (*stack)[stack->size() - arguments.size() + i]);
}

void cast_all(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  for_each_argument(op, stack, [&](const c10::Argument&, c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kSim);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> cast;
      for (const at::Tensor& tensor : value.toTensorVector())
        cast.push_back(at::autocast::cached_cast(dtype, tensor, kSim));
      value = cast;
    }
  });
}

struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastPrivateUse1};
};

void to_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  cast_all(op, stack, at::autocast::get_autocast_dtype(kSim));
  op.callBoxed(stack);
}

void to_float(const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}

// These take the type of their result as an argument, and have it float where nothing else is asked.
void with_float_result(const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  for_each_argument(op, stack, [&](const c10::Argument& argument, c10::IValue& value) {
    if (argument.name() == "dtype" && value.isNone())
      value = static_cast<int64_t>(at::kFloat);
  });
  op.callBoxed(stack);
}

void to_widest(const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  at::ScalarType widest = at::autocast::get_autocast_dtype(kSim);
  for_each_argument(op, stack, [&](const c10::Argument&, c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined())
      widest = at::autocast::promote_type(widest, kSim, value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector())
        widest = at::autocast::promote_type(widest, kSim, tensor);
  });
  cast_all(op, stack, widest);
  op.callBoxed(stack);
}

template <void (*kernel)(const c10::OperatorHandle&, Stack*)>
void implement(torch::Library& m, std::initializer_list<const char*> name_and_overload) {
  std::string name;
  for (const char* part : name_and_overload)
    name += (name.empty() ? "" : ".") + std::string(part);
  m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define NAMES_1(name) {#name}
#define NAMES_2(name, overload) {#name, #overload}
#define NAMES_OF(_1, _2, names, ...) names
#define NAMES(...) NAMES_OF(__VA_ARGS__, NAMES_2, NAMES_1, )(__VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) implement<&to_lower_precision>(m, NAMES(__VA_ARGS__));
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FLOAT(...) implement<&to_float>(m, NAMES(__VA_ARGS__));
  AT_FORALL_FP32(FLOAT)
#define RESULT(...) implement<&with_float_result>(m, NAMES(__VA_ARGS__));
  AT_FORALL_FP32_SET_OPT_DTYPE(RESULT)
#define WIDEST(...) implement<&to_widest>(m, NAMES(__VA_ARGS__));
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace

} // namespace sim
