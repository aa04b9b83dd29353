// CUDA devices: their streams and memory, what kernels report, and the capture of steps into graphs.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "torus/core/cuda.h"
#include "torus/core/memory.h"
#include "torus/core/random.h"

namespace torus::gpu {

void check_call(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // taken note of: the next check is about the next call
  fail(Error::Kind::Device, "[", what, "] CUDA error: ", cudaGetErrorString(error), " (",
       cudaGetErrorName(error), ")");
}

namespace {

[[noreturn]] void fail_to_allocate(size_t bytes, int index) {
  cudaGetLastError();  // taken note of: the next check is about the next call
  size_t available = 0, total = 0;
  cudaMemGetInfo(&available, &total);
  fail(Error::Kind::Memory, "[memory] cannot allocate ", bytes, " bytes on cuda:", index, ", where ",
       available, " of ", total, " are free; ", describe_held_memory({DeviceKind::cuda, index}));
}

// ------------------------------------------------------------------------------------ memory of captured
// steps

// Memory that a captured step takes its tensors from: their addresses stay, so that replays may use them.
class Arena {
 public:
  Arena(cudaStream_t stream, int index) : stream_(stream), index_(index) {}
  ~Arena() {
    for (const Chunk& chunk : chunks_) cudaFreeAsync(chunk.data, stream_);
  }

  void reserve(size_t bytes) {
    // Beside the stream that is being captured, which allows no allocation.
    void* data = nullptr;
    const cudaError_t error = cudaMallocAsync(&data, bytes, stream_);
    if (error == cudaErrorMemoryAllocation) fail_to_allocate(bytes, index_);
    check_call(error, "memory");
    check_call(cudaStreamSynchronize(stream_), "memory");
    chunks_.push_back({static_cast<std::byte*>(data), bytes});
    release(static_cast<std::byte*>(data), bytes);
  }

  // Null where it does not fit.
  void* allocate(size_t bytes) {
    bytes = rounded(bytes);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    if (best == free_.end()) return nullptr;
    std::byte* data = best->first;
    const size_t left = best->second - bytes;
    free_.erase(best);
    if (left > 0) free_[data + bytes] = left;
    ++live_;
    return data;
  }

  void free(void* data, size_t bytes) {
    release(static_cast<std::byte*>(data), rounded(bytes));
    --live_;
  }

  bool holds(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    return std::any_of(chunks_.begin(), chunks_.end(),
                       [=](const Chunk& chunk) { return at >= chunk.data && at < chunk.data + chunk.bytes; });
  }
  int64_t live() const { return live_; }
  // Its graph is gone; it goes with the last tensor.
  void retire() { retired_ = true; }
  bool retired() const { return retired_; }

 private:
  struct Chunk {
    std::byte* data;
    size_t bytes;
  };

  static size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

  void release(std::byte* data, size_t bytes) {
    auto next = free_.lower_bound(data);
    if (next != free_.end() && data + bytes == next->first && same_chunk(data, next->first)) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == data && same_chunk(before->first, data)) {
        before->second += bytes;
        return;
      }
    }
    free_[data] = bytes;
  }

  bool same_chunk(const std::byte* a, const std::byte* b) const {
    for (const Chunk& chunk : chunks_)
      if (a >= chunk.data && a < chunk.data + chunk.bytes) return b < chunk.data + chunk.bytes;
    return false;
  }

  cudaStream_t stream_;
  int index_;  // of the device
  std::vector<Chunk> chunks_;
  std::map<std::byte*, size_t> free_;
  int64_t live_ = 0;
  bool retired_ = false;
};

// ------------------------------------------------------------------------------------------------- devices

constexpr int staging_count = 4;
constexpr size_t staging_bytes = size_t{4} << 20;

struct State {
  cudaStream_t stream = nullptr, side = nullptr;  // `side`: for what a captured stream cannot do
  cudaMemPool_t pool = nullptr;
  cudaDeviceProp properties = {};
  Fault* fault = nullptr;  // on the host, seen by the device
  // Pinned buffers through which data of the host goes, in turn.
  void* staging[staging_count] = {};
  cudaEvent_t staged[staging_count] = {};
  int next_staging = 0;
  std::list<std::shared_ptr<Arena>> arenas;  // that graphs or living tensors use
  std::mutex mutex;                          // of the arenas and the staging buffers
};

int device_count() {
  static const int count = [] {
    int found = 0;
    if (cudaGetDeviceCount(&found) != cudaSuccess) {
      cudaGetLastError();
      found = 0;
    }
    return found;
  }();
  return count;
}

// Never destroyed: tensors in static variables may outlive any static of ours.
State& state(int index) {
  static auto* states = new std::vector<State*>(static_cast<size_t>(device_count()), nullptr);
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  check(index >= 0 && index < device_count(), Error::Kind::Device, "[cuda] no device of index ", index,
        "; there are ", device_count());
  State*& found = (*states)[static_cast<size_t>(index)];
  check_call(cudaSetDevice(index), "cuda");
  if (found) return *found;
  auto made = std::make_unique<State>();
  check_call(cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking), "cuda");
  check_call(cudaStreamCreateWithFlags(&made->side, cudaStreamNonBlocking), "cuda");
  check_call(cudaDeviceGetDefaultMemPool(&made->pool, index), "cuda");
  uint64_t keep = ~uint64_t{0};  // freed memory stays in the pool until it is asked back
  check_call(cudaMemPoolSetAttribute(made->pool, cudaMemPoolAttrReleaseThreshold, &keep), "cuda");
  check_call(cudaGetDeviceProperties(&made->properties, index), "cuda");
  void* slot = nullptr;
  check_call(cudaHostAlloc(&slot, sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable), "cuda");
  made->fault = new (slot) Fault{};
  found = made.release();
  return *found;
}

// ---------------------------------------------------------------------------------------------------- faults

struct FaultTable {
  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> messages;  // code - 1: op, what
};
FaultTable& fault_table() {
  static auto* table = new FaultTable;
  return *table;
}

// Throws what kernels reported; the device must be idle.
void throw_fault(State& device) {
  const int code = *static_cast<volatile int*>(&device.fault->code);
  if (code == 0) return;
  const Fault fault = *device.fault;
  *device.fault = {};
  std::lock_guard lock(fault_table().mutex);
  check(code > 0 && code <= static_cast<int>(fault_table().messages.size()), Error::Kind::Device,
        "[cuda] a kernel reported an unknown fault ", code);
  const auto& [op, what] = fault_table().messages[static_cast<size_t>(code - 1)];
  fail(Error::Kind::Value, "[", op, "] ", what, " ", fault.value, " is outside [0, ", fault.bound, ")");
}

// --------------------------------------------------------------------------------------------------- capture

constexpr int words_at_once = 448;  // as many as fit into the parameters of a kernel
struct Words {
  uint64_t at[words_at_once];
};
__global__ void set_words(uint64_t* to, Words words, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = words.at[i];
}

// What a capture collects for its replays.
struct Capture {
  struct Slot {
    uint64_t now;  // in the step that is captured
    std::function<uint64_t()> later;
  };
  std::shared_ptr<Arena> arena;
  uint64_t number = 0;        // from 1 on, in the order of captures
  uint64_t* words = nullptr;  // of the device, one a slot
  std::vector<Slot> slots;
  std::vector<std::shared_ptr<const void>> kept;
  torus::detail::CapturedDraws draws;
  uint64_t moved = 0;  // how far the generator is from where it was captured
};
constexpr int most_slots = 4096;

thread_local Capture* current_capture = nullptr;

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
Replayed<T> replayed_slot(T value, uint64_t bits, std::function<uint64_t()> later) {
  Capture& capture = *current_capture;
  check(capture.slots.size() < most_slots, Error::Kind::Device, "[capture] a step has at most ", most_slots,
        " numbers that change");
  capture.slots.push_back({bits, std::move(later)});
  return {value, reinterpret_cast<const T*>(capture.words + capture.slots.size() - 1)};
}

class Graph final : public CapturedGraph {
 public:
  Graph(State& device, int index, size_t bytes, const std::function<void()>& step) : device_(device) {
    // What the pool kept of earlier steps is given back first: the arena takes its place.
    check_call(cudaStreamSynchronize(device.stream), "capture");
    check_call(cudaMemPoolTrimTo(device.pool, 0), "capture");
    capture_.arena = std::make_shared<Arena>(device.side, index);
    capture_.arena->reserve(std::max<size_t>(bytes, size_t{1} << 20));
    {
      std::lock_guard lock(device.mutex);
      device.arenas.push_back(capture_.arena);
    }
    try {
      void* words = nullptr;
      check_call(cudaMallocAsync(&words, most_slots * sizeof(uint64_t), device.side), "capture");
      capture_.words = static_cast<uint64_t*>(words);
      check_call(cudaStreamSynchronize(device.side), "capture");
      record(step);
    } catch (...) {
      clear();
      throw;
    }
    // The first launch is the step that was captured.
    std::vector<uint64_t> values;
    for (const Capture::Slot& slot : capture_.slots) values.push_back(slot.now);
    run(values);
  }

  ~Graph() override {
    cudaStreamSynchronize(device_.stream);
    clear();
  }

  void launch() override {
    auto& draws = capture_.draws;
    if (draws.generator) {
      check(draws.generator->seed() == draws.before.seed, Error::Kind::Value,
            "[replay] the generator was seeded anew since the step was captured");
      capture_.moved = draws.generator->reserve(draws.count) - draws.before.position;
    }
    std::vector<uint64_t> values;
    for (const Capture::Slot& slot : capture_.slots) values.push_back(slot.later());
    run(values);
  }

 private:
  void record(const std::function<void()>& step) {
    static std::atomic<uint64_t> captures{0};
    capture_.number = ++captures;
    cudaGraph_t graph = nullptr;
    current_capture = &capture_;
    torus::detail::captured_draws = &capture_.draws;
    const auto end = [&] {
      current_capture = nullptr;
      torus::detail::captured_draws = nullptr;
      return cudaStreamEndCapture(device_.stream, &graph);
    };
    try {
      check_call(cudaStreamBeginCapture(device_.stream, cudaStreamCaptureModeRelaxed), "capture");
      step();
    } catch (...) {
      end();
      cudaGetLastError();
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    check_call(end(), "capture");
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check_call(error, "capture");
  }

  void run(const std::vector<uint64_t>& values) {
    for (size_t first = 0; first < values.size(); first += words_at_once) {
      Words words{};
      const size_t count = std::min<size_t>(words_at_once, values.size() - first);
      std::copy_n(values.data() + first, count, words.at);
      set_words<<<1, 256, 0, device_.stream>>>(capture_.words + first, words, static_cast<int>(count));
      check_launch("replay");
    }
    check_call(cudaGraphLaunch(executable_, device_.stream), "replay");
  }

  void clear() {
    if (executable_) cudaGraphExecDestroy(executable_);
    if (capture_.words) cudaFreeAsync(capture_.words, device_.side);
    std::lock_guard lock(device_.mutex);
    capture_.arena->retire();
    // Tensors of the step that are still held keep its memory.
    if (capture_.arena->live() == 0) device_.arenas.remove(capture_.arena);
  }

  State& device_;
  Capture capture_;
  cudaGraphExec_t executable_ = nullptr;
};

// --------------------------------------------------------------------------------------------------- driver

class CudaDriver final : public DeviceDriver {
 public:
  int count() const override { return device_count(); }

  void synchronize(int index) override {
    State& device = state(index);
    SynchronizationProbe::note("synchronize");
    check_call(cudaStreamSynchronize(device.stream), "synchronize");
    throw_fault(device);
  }

  std::string name(int index) const override { return state(index).properties.name; }

  void* allocate(size_t bytes, int index) override {
    State& device = state(index);
    if (current_capture) {
      std::lock_guard lock(device.mutex);
      Arena& arena = *current_capture->arena;
      if (void* data = arena.allocate(bytes)) return data;
      arena.reserve(std::max(bytes + 512, size_t{64} << 20));
      return arena.allocate(bytes);
    }
    void* data = nullptr;
    cudaError_t error = cudaMallocAsync(&data, bytes, device.stream);
    if (error == cudaErrorMemoryAllocation) {  // what is still in flight may be all that is missing
      cudaGetLastError();
      cudaStreamSynchronize(device.stream);
      cudaMemPoolTrimTo(device.pool, 0);
      error = cudaMallocAsync(&data, bytes, device.stream);
    }
    if (error == cudaErrorMemoryAllocation) fail_to_allocate(bytes, index);
    check_call(error, "memory");
    return data;
  }

  void free(void* data, size_t bytes, int index) override {
    int current = 0;
    if (cudaGetDevice(&current) != cudaSuccess) return;  // the program ends, and the driver is gone
    State& device = state(index);
    {
      std::lock_guard lock(device.mutex);
      for (auto& arena : device.arenas)
        if (arena->holds(data)) {
          arena->free(data, bytes);
          if (arena->retired() && arena->live() == 0) device.arenas.remove(arena);
          return;
        }
    }
    // Memory from before a capture may be let go inside it, by way of the other stream.
    if (current_capture) {
      cudaFreeAsync(data, device.side);
      return;
    }
    cudaFreeAsync(data, device.stream);
    cudaGetLastError();
  }

  size_t cached_bytes(int index) const override {
    State& device = state(index);
    uint64_t reserved = 0, used = 0;
    check_call(cudaMemPoolGetAttribute(device.pool, cudaMemPoolAttrReservedMemCurrent, &reserved), "memory");
    check_call(cudaMemPoolGetAttribute(device.pool, cudaMemPoolAttrUsedMemCurrent, &used), "memory");
    return reserved - used;
  }

  void release_cached(int index) override {
    State& device = state(index);
    check_call(cudaStreamSynchronize(device.stream), "memory");
    check_call(cudaMemPoolTrimTo(device.pool, 0), "memory");
  }

  std::unique_ptr<CapturedGraph> capture(int index, size_t bytes,
                                         const std::function<void()>& step) override {
    check(!current_capture, Error::Kind::Value, "[capture] a step is being captured already");
    return std::make_unique<Graph>(state(index), index, bytes, step);
  }
};

[[maybe_unused]] const bool registered = [] {
  set_driver(DeviceKind::cuda, std::make_unique<CudaDriver>());
  return true;
}();

}  // namespace

// ------------------------------------------------------------------------------------------- for .cu files

cudaStream_t stream_of(Device device) { return state(device.index).stream; }

const cudaDeviceProp& properties(Device device) { return state(device.index).properties; }

void allow_shared_memory(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static auto* allowed = new std::map<std::pair<const void*, int>, size_t>;
  int device = 0;
  check_call(cudaGetDevice(&device), "cuda");
  std::lock_guard lock(mutex);
  size_t& most = (*allowed)[{kernel, device}];
  if (most >= bytes) return;
  check_call(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cuda");
  most = bytes;
}

Fault* fault_slot(Device device) { return state(device.index).fault; }

int fault_code(const char* op, const char* what) {
  FaultTable& table = fault_table();
  std::lock_guard lock(table.mutex);
  const auto found =
      std::find(table.messages.begin(), table.messages.end(), std::pair<std::string, std::string>(op, what));
  if (found != table.messages.end()) return static_cast<int>(found - table.messages.begin()) + 1;
  table.messages.emplace_back(op, what);
  return static_cast<int>(table.messages.size());
}

bool capturing() { return current_capture != nullptr; }
uint64_t capture_number() { return current_capture ? current_capture->number : 0; }

Replayed<double> replayed(double now, std::function<double()> later) {
  if (!capturing()) return {now, nullptr};
  return replayed_slot(now, bits_of(now), [later = std::move(later)] { return bits_of(later()); });
}

Replayed<uint64_t> replayed_position(uint64_t position) {
  if (!capturing()) return {position, nullptr};
  return replayed_slot(position, position,
                       [position, capture = current_capture] { return position + capture->moved; });
}

void keep_for_replays(std::shared_ptr<const void> what) {
  if (capturing()) current_capture->kept.push_back(std::move(what));
}

void copy_from_host(void* to, const void* from, size_t bytes, Device where) {
  State& device = state(where.index);
  check(!capturing(), Error::Kind::Device,
        "[capture] a captured step cannot copy from the host; fill its inputs before");
  std::lock_guard lock(device.mutex);
  for (size_t done = 0; done < bytes; done += staging_bytes) {
    const int turn = device.next_staging++ % staging_count;
    if (!device.staging[turn]) {
      check_call(cudaHostAlloc(&device.staging[turn], staging_bytes, cudaHostAllocDefault), "copy");
      check_call(cudaEventCreateWithFlags(&device.staged[turn], cudaEventDisableTiming), "copy");
    } else {
      check_call(cudaEventSynchronize(device.staged[turn]), "copy");
    }
    const size_t part = std::min(staging_bytes, bytes - done);
    std::memcpy(device.staging[turn], static_cast<const std::byte*>(from) + done, part);
    check_call(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, device.staging[turn], part,
                               cudaMemcpyHostToDevice, device.stream),
               "copy");
    check_call(cudaEventRecord(device.staged[turn], device.stream), "copy");
  }
}

void copy_to_host(void* to, const void* from, size_t bytes, Device where) {
  State& device = state(where.index);
  check(!capturing(), Error::Kind::Device, "[capture] a captured step cannot copy to the host");
  SynchronizationProbe::note("a copy to the host");
  check_call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, device.stream), "copy");
  check_call(cudaStreamSynchronize(device.stream), "copy");
  throw_fault(device);
}

}  // namespace torus::gpu
