// Memory: one allocator a device, counted, so that tests can assert that a step leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "torus/core/device.h"

namespace torus {

/// What the tensors of one device hold.
struct MemoryStats {
  int64_t live_bytes = 0;    // held by living tensors
  int64_t peak_bytes = 0;    // the most that was ever held at once since reset_peak_memory
  int64_t live_blocks = 0;   // storages alive
  int64_t cached_bytes = 0;  // freed by tensors, kept for reuse
};

MemoryStats memory_stats(Device device = cpu);
/// Sets peak_bytes to what is held now.
void reset_peak_memory(Device device = cpu);
/// What the living tensors of an op hold.
struct HeldMemory {
  std::string op;  // that wrote them first; "" where none did
  int64_t bytes = 0, blocks = 0;
};
/// All that living tensors hold, most bytes first.
std::vector<HeldMemory> held_memory(Device device = cpu);
/// "tensors hold 300 bytes: linear 200 (2), fill 100 (1)", at most five ops: for messages of drivers that
/// have no more.
std::string describe_held_memory(Device device);
/// Returns the blocks kept for reuse to the system.
void release_cached_memory(Device device = cpu);

/// Device work that can be run again.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  virtual void launch() = 0;
};

/// What one kind of device offers. That of CUDA registers itself at start-up with `set_driver`.
class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;
  /// Devices of this kind that can be used.
  virtual int count() const = 0;
  virtual void synchronize(int index) = 0;
  virtual std::string name(int index) const = 0;
  /// At least `bytes` bytes (more than 0), aligned to 64. Throws Error{Memory}.
  virtual void* allocate(size_t bytes, int index) = 0;
  virtual void free(void* data, size_t bytes, int index) = 0;
  virtual size_t cached_bytes(int index) const = 0;
  virtual void release_cached(int index) = 0;
  /// As `capture` below; a kind of device that has no graphs just runs the step.
  virtual std::unique_ptr<CapturedGraph> capture(int index, size_t bytes, const std::function<void()>& step,
                                                 std::string& why_not);
};
/// Runs `step`, its device work as a graph that can be launched again. A step that does what cannot be
/// captured is captured up to there, runs on as it is, and gives null and the reason. `bytes`: about what it
/// allocates at once.
std::unique_ptr<CapturedGraph> capture(Device device, size_t bytes, const std::function<void()>& step,
                                       std::string& why_not);
void set_driver(DeviceKind kind, std::unique_ptr<DeviceDriver> driver);

/// A block of memory that tensors share, with a counter of the writes to it.
class Storage {
 public:
  Storage(size_t bytes, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Goes up with every mutable access; the tape compares it to catch writes to what it saved.
  uint64_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  /// Whom `held_memory` names: the op that was recorded with it, else the kernel that wrote it first. Names
  /// are literals.
  void note_kernel(const char* name) {
    if (!writer_.load(std::memory_order_relaxed)) writer_.store(name, std::memory_order_relaxed);
  }
  void note_op(const char* name) {
    if (!named_.exchange(true, std::memory_order_relaxed)) writer_.store(name, std::memory_order_relaxed);
  }

 private:
  friend std::vector<HeldMemory> held_memory(Device device);

  void* data_;
  size_t bytes_;
  Device device_;
  std::atomic<uint64_t> version_{0};
  std::atomic<const char*> writer_{nullptr};
  std::atomic<bool> named_{false};
  Storage *next_ = nullptr, *previous_ = nullptr;  // those alive on the device
};

}  // namespace torus
