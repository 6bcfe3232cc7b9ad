// What Python sees of the simulator.
#include "backend.h"
#include "device.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using sim::model;
  m.def("races", [] { return model().races(); });
  m.def("early_frees", [] { return model().early_frees(); });
  m.def("launches", [] { return model().launches(); });
  m.def("waits", [] {
    std::vector<std::pair<std::string, std::string>> waits;
    for (auto& wait : model().waits())
      waits.emplace_back(wait.what, wait.where);
    return waits;
  });
  m.def("reset", [] { model().reset(); });
  m.def("watch", &sim::watch);
  m.def("default_generator", &sim::default_generator);
  m.def("delay_events", [](int queries) { sim::event_delay() = queries; });

  py::module::import("torch._C._distributed_c10d"); // knows the base class
  py::class_<sim::Wire, std::shared_ptr<sim::Wire>>(m, "Wire")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
      .def("renew", &sim::Wire::renew)
      .def(
          "meet",
          [](sim::Wire& wire, const std::string& what, std::chrono::milliseconds timeout) {
            wire.meet_all(what, timeout);
            sim::raise_failure();
          },
          py::call_guard<py::gil_scoped_release>());
  py::class_<sim::SimNccl, c10::intrusive_ptr<sim::SimNccl>, c10d::Backend>(m, "SimNccl")
      .def(py::init<
           std::shared_ptr<sim::Wire>, std::string, std::vector<int>, int, std::chrono::milliseconds>());
}
