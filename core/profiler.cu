// Kernels and copies on CUDA devices beside the scopes of the host, by CUPTI, which is looked for only when a
// profiler starts: a program that profiles nothing needs no CUPTI.
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "torus/core/cuda.h"
#include "torus/core/device_profiler.h"
#include "torus/core/profiler.h"

namespace torus {

namespace {

struct Cupti {
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  decltype(&cuptiActivityRegisterCallbacks) callbacks = nullptr;
  decltype(&cuptiGetTimestamp) timestamp = nullptr;

  bool found() const { return enable && disable && flush && next && callbacks && timestamp; }
};

const Cupti& cupti() {
  static const Cupti library = [] {
    Cupti result;
    void* handle = nullptr;
    for (const char* name : {"libcupti.so.13", "libcupti.so.12", "libcupti.so"})
      if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return result;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    };
    find(result.enable, "cuptiActivityEnable");
    find(result.disable, "cuptiActivityDisable");
    find(result.flush, "cuptiActivityFlushAll");
    find(result.next, "cuptiActivityGetNextRecord");
    find(result.callbacks, "cuptiActivityRegisterCallbacks");
    find(result.timestamp, "cuptiGetTimestamp");
    return result;
  }();
  return library;
}

int64_t clock_offset = 0;  // of profile_clock and CUPTI's

// "softmax_rows" of "void torus::(anonymous namespace)::softmax_rows<float, 4>(float*, ...)".
std::string short_name(const char* symbol) {
  int status = 0;
  char* readable = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = status == 0 && readable ? readable : symbol;
  std::free(readable);
  const std::string nameless = "(anonymous namespace)::";
  for (size_t at; (at = name.find(nameless)) != std::string::npos;) name.erase(at, nameless.size());
  name = name.substr(0, name.find_first_of("<("));
  const size_t start = name.find_last_of(" :");
  return start == std::string::npos ? name : name.substr(start + 1);
}

void add(std::string name, uint32_t device, uint64_t start, uint64_t end, double bytes) {
  ProfileEvent event;
  event.name = std::move(name);
  event.kind = ScopeKind::device;
  event.device = {DeviceKind::cuda, static_cast<int>(device)};
  event.track = profile_track("cuda:" + std::to_string(device));
  event.start = static_cast<int64_t>(start) + clock_offset;
  event.end = static_cast<int64_t>(end) + clock_offset;
  event.bytes = bytes;
  add_profile_event(std::move(event));
}

constexpr size_t buffer_bytes = size_t{4} << 20;

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, buffer_bytes));
  *size = *buffer ? buffer_bytes : 0;
  *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t size) {
  CUpti_Activity* record = nullptr;
  while (cupti().next(buffer, size, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      add(short_name(kernel->name), kernel->deviceId, kernel->start, kernel->end, 0);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
      add("memcpy", copy->deviceId, copy->start, copy->end, static_cast<double>(copy->bytes));
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* set = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      add("memset", set->deviceId, set->start, set->end, static_cast<double>(set->bytes));
    }
  }
  std::free(buffer);
}

constexpr CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMSET};

void start() {
  if (cuda_device_count() == 0) return;
  const Cupti& library = cupti();
  if (!library.found()) {
    std::fputs("torus: no libcupti here, so a profile shows no kernels of CUDA devices\n", stderr);
    return;
  }
  library.callbacks(give_buffer, take_buffer);
  uint64_t now = 0;
  library.timestamp(&now);
  clock_offset = profile_clock() - static_cast<int64_t>(now);
  for (CUpti_ActivityKind kind : kinds) library.enable(kind);
}

void stop() {
  const Cupti& library = cupti();
  if (cuda_device_count() == 0 || !library.found()) return;
  gpu::end_capture("the step ends a profile");
  cudaDeviceSynchronize();
  for (CUpti_ActivityKind kind : kinds) library.disable(kind);
  library.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
}

[[maybe_unused]] const bool registered = [] {
  detail::set_device_profiler({start, stop});
  return true;
}();

}  // namespace

}  // namespace torus
