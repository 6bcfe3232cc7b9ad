// The lines of Python that led to a launch, a wait or a free.
#include <Python.h>

#include "model.h"

namespace sim {

namespace {

constexpr int kFrames = 3;

std::vector<std::string>& roots() {
  static auto* folders = new std::vector<std::string>;
  return *folders;
}

std::vector<std::string>& harness() {
  static auto* paths = new std::vector<std::string>;
  return *paths;
}

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

bool in_harness(const std::string& file) {
  for (auto& path : harness())
    if (starts_with(file, path))
      return true;
  return false;
}

// "lightning_gradavg/reduction/reducer.py" for a file below a watched folder, which ends with the part to be shown; for
// others, the part below site-packages if `any`, and else nothing.
std::string shown(const std::string& file, bool any) {
  for (auto& root : roots())
    if (starts_with(file, root + "/") && !in_harness(file))
      return file.substr(root.rfind('/') + 1);
  size_t packages = file.rfind("site-packages/");
  return !any ? "" : packages == std::string::npos ? file : file.substr(packages + 14);
}

} // namespace

void watch(std::vector<std::string> folders, std::vector<std::string> left_out) {
  roots() = std::move(folders);
  harness() = std::move(left_out);
}

// The innermost frame, whoever's it is, and then the watched ones around it. Nothing at all is a thread of torch's own, such
// as autograd's.
//
// Takes the GIL: never call it with a lock held that a thread with the GIL may wait for.
std::string where() {
  if (!Py_IsInitialized())
    return "";
  PyGILState_STATE gil = PyGILState_Ensure();
  std::string lines;
  int found = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && found < kFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* function = PyUnicode_AsUTF8(code->co_name);
    std::string path = shown(file ? file : "", lines.empty());
    if (!path.empty()) {
      found += !lines.empty();
      lines += (lines.empty() ? "" : " < ") + path + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
          (function ? function : "?");
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return lines;
}

} // namespace sim
