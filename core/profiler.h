// Profiler: what ran when, on which thread, on which shapes and at what rate; and memory over time.
//
//     Profiler profiler;                     // from here on, ops and their kernels are timed
//     { ProfileScope scope("step"); ... }    // and what the user names
//     std::cout << profiler.summary();       // a table
//     profiler.write_trace("trace.json");    // a time line, for https://ui.perfetto.dev
#pragma once

#include <atomic>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "torus/core/device.h"
#include "torus/core/dtype.h"
#include "torus/core/shape.h"

namespace torus {

class Tensor;

enum class ScopeKind {
  user,      // named by a ProfileScope
  forward,   // a call of an op
  backward,  // the backward of a node of the tape, by the name of its op
  kernel,    // a call of a Kernel; on another device than the processor, its launch
  device     // timed by a device itself
};
const char* name(ScopeKind kind);

/// One thing that ran.
struct ProfileEvent {
  std::string name = {};
  ScopeKind kind = ScopeKind::user;
  int track = 0;                // a thread of the processor, or one that `profile_track` made
  int64_t start = 0, end = 0;   // ns by `profile_clock`
  int64_t inside = 0;           // ns of these in scopes inside it
  double flops = 0, bytes = 0;  // of products and attention; moved; with those of the scopes inside it
  std::string shapes = {};      // "f32 [8, 64], f32 [64]"
  std::string op = {};          // of a kernel: the call of an op that it is part of, "matmul backward"
  Device device = cpu;
  int64_t live_bytes = -1;  // that the tensors of `device` held at its end; -1: not known
};

struct ProfileSummary {
  /// All events of one kind and name; of kernels, those that are part of one op's forward or backward.
  struct Row {
    std::string name;
    ScopeKind kind = ScopeKind::user;
    std::string op;  // as in ProfileEvent
    int64_t calls = 0;
    double seconds = 0;           // from start to end, so that scopes inside others count in both
    double own_seconds = 0;       // without the scopes inside; an op's kernels are its own
    double share = 0;             // of own_seconds in all of the time; that of devices is counted apart
    double flops = 0, bytes = 0;  // with those of the scopes inside; divide by seconds for the rate
  };
  /// Most own time first, each op followed by its kernels. The shares of rows without an `op` add up to 1 (of
  /// the host, and of devices); those of an op's kernels are parts of its own.
  std::vector<Row> rows;
  int64_t device_kernels = 0;  // that devices ran, copies not among them
  double device_seconds = 0;   // of these and of copies

  /// All rows of this name and kind added up; throws Error{Value} if there is none.
  Row row(const std::string& name, ScopeKind kind = ScopeKind::kernel) const;
};
/// Calls, total and mean time, share, GFLOP/s and GB/s, a line a row; kernels are indented under their op.
std::ostream& operator<<(std::ostream& out, const ProfileSummary& summary);

/// While alive and until `stop`, records the scopes that all threads open and close. One at a time: a second
/// one throws Error{Value}. Scopes that are still open when it stops are left out.
class Profiler {
 public:
  Profiler();
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends recording; what was recorded stays.
  void stop();
  /// In the order in which they ended.
  std::vector<ProfileEvent> events() const;
  ProfileSummary summary() const;
  /// Writes JSON in Chrome's trace event format: a track a thread, and counters of live memory. Throws
  /// Error{File}.
  void write_trace(const std::string& path) const;

 private:
  std::vector<ProfileEvent> events_;
  friend void add_profile_event(ProfileEvent event);
};

/// Nanoseconds of a clock that never goes back.
int64_t profile_clock();
/// The track of this name; made by the first call.
int profile_track(const std::string& name);
/// Adds an event that was timed elsewhere, say on a stream of a device; ignored where no profiler records.
void add_profile_event(ProfileEvent event);

namespace detail {
// Who wants scopes opened: the profiler, and each AnomalyMode, which wants their names.
extern std::atomic<int> scope_listeners;
// The named scopes that are open on this thread, outermost first: "step/block 3".
std::string open_scopes();
// Shows a tensor's shape in the innermost scope of this thread, if that is the forward of `op`.
void show_in_forward(const char* op, const Tensor& tensor);
}  // namespace detail

/// Times from here to the end of the C++ scope, under a name. Costs one relaxed load where nobody listens.
class ProfileScope {
 public:
  explicit ProfileScope(const char* name, ScopeKind kind = ScopeKind::user) {
    if (detail::scope_listeners.load(std::memory_order_relaxed) != 0) [[unlikely]]
      open(name, kind);
  }
  explicit ProfileScope(const std::string& name) : ProfileScope(name.c_str()) {}
  ~ProfileScope() {
    if (depth_ > 0) [[unlikely]]
      close();
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

  /// True if somebody listens: ask before working out FLOPs.
  explicit operator bool() const { return depth_ > 0; }
  /// Shows the tensor's shape, if few were shown before; an undefined one is left out.
  void show(const Tensor& tensor);
  /// Shows the tensor's shape and counts its bytes as moved, those of expanded axes once.
  void add(const Tensor& tensor);
  void add_flops(double flops);

 private:
  void open(const char* name, ScopeKind kind);
  void close();

  size_t depth_ = 0;  // its place among the open scopes of the thread, counted from 1
};

}  // namespace torus
