#include "torus/core/memory.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <ostream>
#include <sstream>
#include <utility>
#include <vector>

#include "torus/core/error.h"

namespace torus {

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t cache_limit = 0;  // so that the sanitizer sees every use after free
#else
constexpr size_t cache_limit = size_t{2} << 30;
#endif

// Freed blocks are kept by size, because the same sizes come back every training step and fresh pages cost
// more than the arithmetic on them. Small blocks are left to malloc, which does this itself.
class HostDriver final : public DeviceDriver {
 public:
  int count() const override { return 1; }
  void synchronize(int) override {}
  std::string name(int) const override { return "cpu"; }

  void* allocate(size_t bytes, int) override {
    bytes = rounded(bytes);
    if (bytes >= cached_from) {
      std::lock_guard lock(mutex_);
      if (auto found = free_.find(bytes); found != free_.end() && !found->second.empty()) {
        void* data = found->second.back();
        found->second.pop_back();
        cached_ -= bytes;
        return data;
      }
    }
    void* data = std::aligned_alloc(64, bytes);
    if (!data) {  // what is cached may be all that is missing
      release_cached(0);
      data = std::aligned_alloc(64, bytes);
    }
    if (!data)
      fail(Error::Kind::Memory, "[memory] cannot allocate ", bytes, " bytes on cpu; ",
           describe_held_memory(cpu));
    return data;
  }

  void free(void* data, size_t bytes, int) override {
    bytes = rounded(bytes);
    if (bytes >= cached_from) {
      std::lock_guard lock(mutex_);
      if (cached_ + bytes <= cache_limit) {
        free_[bytes].push_back(data);
        cached_ += bytes;
        return;
      }
    }
    std::free(data);
  }

  size_t cached_bytes(int) const override {
    std::lock_guard lock(mutex_);
    return cached_;
  }

  void release_cached(int) override {
    std::lock_guard lock(mutex_);
    for (auto& [bytes, blocks] : free_)
      for (void* data : blocks) std::free(data);
    free_.clear();
    cached_ = 0;
  }

  // While the process forks.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr size_t cached_from = 4096;

  // Sizes in steps of an eighth of their power of two, so that similar sizes share a list.
  static size_t rounded(size_t bytes) {
    size_t step = 64;
    while (step * 16 <= bytes) step *= 2;
    return (bytes + step - 1) / step * step;
  }

  mutable std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
  size_t cached_ = 0;
};

struct Counters {
  std::atomic<int64_t> live{0}, peak{0}, blocks{0};
  std::mutex mutex;  // of the list of storages
  Storage* first = nullptr;
  void add(int64_t bytes) {
    const int64_t now = live.fetch_add(bytes) + bytes;
    int64_t seen = peak.load();
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
  }
};

constexpr int max_devices = 16;

// Never destroyed: tensors in static variables may outlive any static of ours.
struct Registry {
  std::array<std::unique_ptr<DeviceDriver>, device_kinds> drivers;
  Counters counters[device_kinds][max_devices];
  Registry() { drivers[0] = std::make_unique<HostDriver>(); }
};
Registry& registry();

// No thread makes or frees a tensor while the process forks, so that its child can.
template <bool locks>
void around_fork() {
  auto& host = static_cast<HostDriver&>(*registry().drivers[0]);
  std::mutex& list = registry().counters[0][0].mutex;
  if (locks) {
    host.lock();
    list.lock();
  } else {
    list.unlock();
    host.unlock();
  }
}

Registry& registry() {
  static auto* instance = [] {
    pthread_atfork(around_fork<true>, around_fork<false>, around_fork<false>);
    return new Registry;
  }();
  return *instance;
}

DeviceDriver& driver(Device device) {
  auto& found = registry().drivers[static_cast<size_t>(device.kind)];
  check(found != nullptr, Error::Kind::Device, "[device] no ", name(device.kind), " in this build");
  const int count = found->count();
  check(count > 0, Error::Kind::Device, "[device] no ", name(device.kind), " device on this machine");
  check(device.index >= 0 && device.index < std::min(count, max_devices), Error::Kind::Device,
        "[device] index of ", name(device.kind), " must be in [0, ", std::min(count, max_devices), "), got ",
        device.index);
  return *found;
}

Counters& counters(Device device) { return registry().counters[static_cast<int>(device.kind)][device.index]; }

}  // namespace

void set_driver(DeviceKind kind, std::unique_ptr<DeviceDriver> driver) {
  registry().drivers[static_cast<size_t>(kind)] = std::move(driver);
}

std::unique_ptr<CapturedGraph> DeviceDriver::capture(int, size_t, const std::function<void()>& step,
                                                     std::string& why_not) {
  why_not = "this kind of device runs steps as they are";
  step();
  return nullptr;
}

std::unique_ptr<CapturedGraph> capture(Device device, size_t bytes, const std::function<void()>& step,
                                       std::string& why_not) {
  return driver(device).capture(device.index, bytes, step, why_not);
}

int cuda_device_count() {
  const auto& found = registry().drivers[static_cast<size_t>(DeviceKind::cuda)];
  return found ? std::min(found->count(), max_devices) : 0;
}

std::string device_name(Device device) { return driver(device).name(device.index); }

void synchronize(Device device) { driver(device).synchronize(device.index); }

MemoryStats memory_stats(Device device) {
  const auto cached = driver(device).cached_bytes(device.index);
  const auto& c = counters(device);
  return {c.live, c.peak, c.blocks, static_cast<int64_t>(cached)};
}

void reset_peak_memory(Device device) {
  auto& c = counters(device);
  c.peak = c.live.load();
}

void release_cached_memory(Device device) { driver(device).release_cached(device.index); }

std::vector<HeldMemory> held_memory(Device device) {
  driver(device);  // for its checks
  std::map<std::string, HeldMemory> by_op;
  {
    Counters& c = counters(device);
    std::lock_guard lock(c.mutex);
    for (const Storage* storage = c.first; storage; storage = storage->next_) {
      const char* const writer = storage->writer_.load(std::memory_order_relaxed);
      HeldMemory& held = by_op[writer ? writer : ""];
      held.bytes += static_cast<int64_t>(storage->bytes_);
      ++held.blocks;
    }
  }
  std::vector<HeldMemory> result;
  for (auto& [op, held] : by_op) {
    held.op = op;
    result.push_back(held);
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const HeldMemory& a, const HeldMemory& b) { return a.bytes > b.bytes; });
  return result;
}

std::string describe_held_memory(Device device) {
  constexpr size_t most = 5;
  const std::vector<HeldMemory> all = held_memory(device);
  std::ostringstream text;
  text << "tensors hold " << memory_stats(device).live_bytes << " bytes";
  for (size_t i = 0; i < std::min(most, all.size()); ++i)
    text << (i == 0 ? ": " : ", ") << (all[i].op.empty() ? "no op" : all[i].op) << ' ' << all[i].bytes << " ("
         << all[i].blocks << ')';
  if (all.size() > most) text << ", ...";
  return text.str();
}

Storage::Storage(size_t bytes, Device device)
    : data_(bytes ? driver(device).allocate(bytes, device.index) : nullptr), bytes_(bytes), device_(device) {
  Counters& c = counters(device);
  c.add(static_cast<int64_t>(bytes));
  ++c.blocks;
  std::lock_guard lock(c.mutex);
  next_ = std::exchange(c.first, this);
  if (next_) next_->previous_ = this;
}

Storage::~Storage() {
  if (data_) driver(device_).free(data_, bytes_, device_.index);
  Counters& c = counters(device_);
  c.live -= static_cast<int64_t>(bytes_);
  --c.blocks;
  std::lock_guard lock(c.mutex);
  (previous_ ? previous_->next_ : c.first) = next_;
  if (next_) next_->previous_ = previous_;
}

}  // namespace torus
