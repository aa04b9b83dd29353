// Memory: one allocator a device, counted, so that tests can assert that a step leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

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
/// Returns the blocks kept for reuse to the system.
void release_cached_memory(Device device = cpu);

/// How one kind of device allocates. A backend registers one at start-up with `set_allocator`.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes (more than 0), aligned to 64. Throws Error{Memory}.
  virtual void* allocate(size_t bytes, int index) = 0;
  virtual void free(void* data, size_t bytes, int index) = 0;
  virtual size_t cached_bytes(int index) const = 0;
  virtual void release_cached(int index) = 0;
};
void set_allocator(DeviceKind kind, std::unique_ptr<Allocator> allocator);

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

 private:
  void* data_;
  size_t bytes_;
  Device device_;
  std::atomic<uint64_t> version_{0};
};

}  // namespace torus
