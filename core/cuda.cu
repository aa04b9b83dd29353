// CUDA devices: their streams and memory, what kernels report, and the capture of steps into graphs.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <utility>
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
  explicit Arena(cudaStream_t stream) : stream_(stream) {}
  ~Arena() {
    for (const Chunk& chunk : chunks_) cudaFreeAsync(chunk.data, stream_);
  }

  // More memory, of the stream that it was made with.
  void add(void* data, size_t bytes) {
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

// Null where there is too little memory.
void* allocate_on(cudaStream_t stream, size_t bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMallocAsync(&data, bytes, stream);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // taken note of: the next check is about the next call
    return nullptr;
  }
  check_call(error, "memory");
  return data;
}

// Beside the device's stream, so that it may be captured meanwhile, and for work on any.
void* allocate_aside(State& device, size_t bytes) {
  void* const data = allocate_on(device.side, bytes);
  if (data) check_call(cudaStreamSynchronize(device.side), "memory");
  return data;
}

// What is still in flight, or kept in the pool, may be all that is missing.
void make_room(State& device) {
  cudaStreamSynchronize(device.stream);
  cudaMemPoolTrimTo(device.pool, 0);
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

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

class Graph;
thread_local Graph* current = nullptr;  // whose step runs on this thread
constexpr size_t most_slots = 4096;
constexpr const char* no_memory = "the step needs more memory than there is while it is captured";

class Graph final : public CapturedGraph {
 public:
  Graph(State& device, int index, size_t bytes)
      : device_(device), arena_(std::make_shared<Arena>(device.side)) {
    // What the pool kept of earlier steps is given back first: the arena takes its place.
    check_call(cudaStreamSynchronize(device.stream), "capture");
    check_call(cudaMemPoolTrimTo(device.pool, 0), "capture");
    constexpr size_t words_bytes = most_slots * sizeof(uint64_t);
    words_ = static_cast<uint64_t*>(allocate_aside(device, words_bytes));
    if (!words_) fail_to_allocate(words_bytes, index);
    if (!grow(std::max<size_t>(bytes, size_t{1} << 20))) {
      cudaFreeAsync(words_, device.side);
      fail_to_allocate(bytes, index);
    }
    std::lock_guard lock(device.mutex);
    device.arenas.push_back(arena_);
  }

  ~Graph() override {
    cudaStreamSynchronize(device_.stream);
    if (executable_) cudaGraphExecDestroy(executable_);
    cudaFreeAsync(words_, device_.side);
    std::lock_guard lock(device_.mutex);
    arena_->retire();
    // Tensors of the step that are still held keep its memory.
    if (arena_->live() == 0) device_.arenas.remove(arena_);
  }

  // Runs the step, captured as far as it can be. Whether that is all of it; else `why_not` says what ended
  // it.
  bool record(const std::function<void()>& step, std::string& why_not) {
    static std::atomic<uint64_t> captures{0};
    number_ = ++captures;
    why_not_ = &why_not;
    Graph* const outer = std::exchange(current, this);
    try {
      check_call(cudaStreamBeginCapture(device_.stream, cudaStreamCaptureModeRelaxed), "capture");
      capturing_ = true;
      draws_.end_capture = gpu::end_capture;
      torus::detail::captured_draws = &draws_;
      step();
      if (capturing_) check_call(finish(), "capture");
    } catch (...) {
      if (capturing_) finish();  // as an ordinary step: what comes before the error has run
      current = outer;
      throw;
    }
    current = outer;
    return why_not.empty();
  }

  bool capturing() const { return capturing_; }
  bool is_on(const State& device) const { return &device == &device_; }

  // The capture ends before the step does.
  void end(const char* why) {
    *why_not_ = why;
    check_call(finish(), "capture");
  }

  void launch() override {
    gpu::end_capture("the step replays another");
    if (draws_.generator) {
      check(draws_.generator->seed() == draws_.before.seed, Error::Kind::Value,
            "[replay] the generator was seeded anew since the step was captured");
      moved_ = draws_.generator->reserve(draws_.count) - draws_.before.position;
    }
    std::vector<uint64_t> values;
    for (const Slot& slot : slots_) values.push_back(slot.later());
    check_call(run(values), "replay");
  }

  uint64_t number() const { return number_; }
  // How far the generator is from where it was captured.
  uint64_t moved() const { return moved_; }
  void keep(std::shared_ptr<const void> what) { kept_.push_back(std::move(what)); }

  // A word of the device that holds `now` in the step that is captured, and later() in each replay.
  const uint64_t* add_slot(uint64_t now, std::function<uint64_t()> later) {
    if (slots_.size() == most_slots) {
      gpu::end_capture("the step has more than 4096 numbers that change");
      return nullptr;
    }
    slots_.push_back({now, std::move(later)});
    return words_ + slots_.size() - 1;
  }

  // From the arena, whose addresses stay; also after the capture ended within the step, as it took the place
  // of what the pool had. Null where it does not fit.
  void* allocate(size_t bytes) {
    const auto fit = [&] {
      std::lock_guard lock(device_.mutex);
      return arena_->allocate(bytes);
    };
    void* data = fit();
    if (data || !capturing_) return data;
    if (grow(std::max(bytes + 512, size_t{64} << 20))) return fit();
    gpu::end_capture(no_memory);
    return nullptr;
  }

 private:
  struct Slot {
    uint64_t now;
    std::function<uint64_t()> later;
  };

  bool grow(size_t bytes) {
    void* const data = allocate_aside(device_, bytes);
    if (!data) return false;
    std::lock_guard lock(device_.mutex);
    arena_->add(data, bytes);
    return true;
  }

  // Ends the capture and launches what it holds.
  cudaError_t finish() {
    capturing_ = false;
    torus::detail::captured_draws = nullptr;
    cudaGraph_t graph = nullptr;
    cudaError_t error = cudaStreamEndCapture(device_.stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&executable_, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    std::vector<uint64_t> values;
    for (const Slot& slot : slots_) values.push_back(slot.now);
    if (error == cudaSuccess) error = run(values);
    if (error != cudaSuccess) {
      cudaGetLastError();
      *why_not_ = std::string("the capture failed: ") + cudaGetErrorString(error);
    }
    return error;
  }

  cudaError_t run(const std::vector<uint64_t>& values) {
    for (size_t first = 0; first < values.size(); first += words_at_once) {
      Words words{};
      const size_t count = std::min<size_t>(words_at_once, values.size() - first);
      std::copy_n(values.data() + first, count, words.at);
      set_words<<<1, 256, 0, device_.stream>>>(words_ + first, words, static_cast<int>(count));
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaGraphLaunch(executable_, device_.stream);
  }

  State& device_;
  std::shared_ptr<Arena> arena_;
  uint64_t number_ = 0;        // from 1 on, in the order of captures
  uint64_t* words_ = nullptr;  // of the device, one a slot
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<const void>> kept_;
  torus::detail::CapturedDraws draws_;
  uint64_t moved_ = 0;
  std::string* why_not_ = nullptr;
  bool capturing_ = false;
  cudaGraphExec_t executable_ = nullptr;
};

// --------------------------------------------------------------------------------------------------- driver

class CudaDriver final : public DeviceDriver {
 public:
  int count() const override { return device_count(); }

  void synchronize(int index) override {
    State& device = state(index);
    end_capture("the step waits for the device: synchronize");
    check_call(cudaStreamSynchronize(device.stream), "synchronize");
    throw_fault(device);
  }

  std::string name(int index) const override { return state(index).properties.name; }

  void* allocate(size_t bytes, int index) override {
    State& device = state(index);
    if (current && current->is_on(device))
      if (void* data = current->allocate(bytes)) return data;
    void* data = allocate_on(device.stream, bytes);
    if (!data) {
      make_room(device);
      data = allocate_on(device.stream, bytes);
    }
    if (!data) fail_to_allocate(bytes, index);
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
    cudaFreeAsync(data, capturing() ? device.side : device.stream);
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
    end_capture("the step waits for the device: release_cached_memory");
    check_call(cudaStreamSynchronize(device.stream), "memory");
    check_call(cudaMemPoolTrimTo(device.pool, 0), "memory");
  }

  std::unique_ptr<CapturedGraph> capture(int index, size_t bytes, const std::function<void()>& step,
                                         std::string& why_not) override {
    end_capture("the step captures another");
    why_not.clear();
    std::unique_ptr<Graph> graph;
    try {
      graph = std::make_unique<Graph>(state(index), index, bytes);
    } catch (const Error& error) {  // there is too little memory for it
      why_not = error.what();
    }
    if (!graph)
      step();
    else if (!graph->record(step, why_not))
      graph.reset();
    return graph;
  }
};

[[maybe_unused]] const bool registered = [] {
  set_driver(DeviceKind::cuda, std::make_unique<CudaDriver>());
  return true;
}();

}  // namespace

// ------------------------------------------------------------------------------------------- for .cu files

bool waits_for_kernel_before(const void* kernel) {
  cudaFuncAttributes attributes{};
  check_call(cudaFuncGetAttributes(&attributes, kernel), "launch");
  return attributes.ptxVersion >= 90;
}

cudaStream_t stream_of(Device device) {
  State& found = state(device.index);
  if (capturing() && !current->is_on(found)) end_capture("the step uses two devices");
  return found.stream;
}

const cudaDeviceProp& properties(Device device) { return state(device.index).properties; }

void* allocate_for_good(size_t bytes, Device where) {
  State& device = state(where.index);
  void* data = allocate_aside(device, bytes);
  if (!data) {
    end_capture(no_memory);
    make_room(device);
    data = allocate_aside(device, bytes);
  }
  if (!data) fail_to_allocate(bytes, where.index);
  check_call(cudaMemsetAsync(data, 0, bytes, device.side), "memory");
  check_call(cudaStreamSynchronize(device.side), "memory");
  return data;
}

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

bool capturing() { return current && current->capturing(); }
void end_capture(const char* why) {
  if (capturing()) current->end(why);
}
uint64_t capture_number() { return capturing() ? current->number() : 0; }

Replayed<double> replayed(double now, std::function<double()> later) {
  if (!capturing()) return {now, nullptr};
  const uint64_t* const slot =
      current->add_slot(bits_of(now), [later = std::move(later)] { return bits_of(later()); });
  return {now, reinterpret_cast<const double*>(slot)};
}

Replayed<uint64_t> replayed_position(uint64_t position) {
  if (!capturing()) return {position, nullptr};
  return {position,
          current->add_slot(position, [position, graph = current] { return position + graph->moved(); })};
}

void keep_for_replays(std::shared_ptr<const void> what) {
  if (capturing()) current->keep(std::move(what));
}

void copy_from_host(void* to, const void* from, size_t bytes, Device where) {
  State& device = state(where.index);
  end_capture("the step copies from the host");
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
  end_capture("the step waits for the device: a copy to the host");
  check_call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, device.stream), "copy");
  check_call(cudaStreamSynchronize(device.stream), "copy");
  throw_fault(device);
}

}  // namespace torus::gpu
