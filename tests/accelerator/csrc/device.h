// What the parts of the simulator that know torch share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "model.h"

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

// The stream that this thread launches on.
c10::Stream stream_of(int64_t id);
int64_t current_stream();

inline bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A launch on the current stream, and what it reads and writes. Strided tensors count from their first to their last byte.
LaunchPtr launched(const std::string& what);
void touch(const at::Tensor& tensor, bool writes, const LaunchPtr& launch);

// The host waits for the current stream, and learns of what failed on the device.
void host_waits(const std::string& what);
void raise_failure();

// How often an event answers "not yet" before it counts as over.
int& event_delay();

c10::Allocator* device_allocator();

// The same memory, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor);

// The generator of the CPU behind one of this device.
at::Generator host_generator(const at::Generator& generator);
at::Generator default_generator();

} // namespace sim
