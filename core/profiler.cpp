#include "torus/core/profiler.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iomanip>
#include <locale>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "torus/core/device_profiler.h"
#include "torus/core/error.h"
#include "torus/core/tensor.h"

namespace torus {

std::atomic<int> detail::scope_listeners{0};

namespace {

// Never destroyed: a thread may close a scope while static variables are taken down.
struct Shared {
  std::mutex mutex;
  Profiler* active = nullptr;
  std::vector<std::string> tracks;
};
Shared& shared() {
  static auto* instance = new Shared;
  return *instance;
}

// Tells the scopes of one profiler from those that an earlier one left open; 0 while none records.
std::atomic<uint64_t> session{0};

struct OpenScope {
  uint64_t session;
  ProfileEvent event;
};
thread_local std::vector<OpenScope> open;

int track_of_this_thread() {
  thread_local const int track = [] {
    std::lock_guard lock(shared().mutex);
    shared().tracks.push_back("thread " + std::to_string(shared().tracks.size()));
    return static_cast<int>(shared().tracks.size()) - 1;
  }();
  return track;
}

// "matmul backward"
std::string title(const ProfileEvent& event) { return event.name + ' ' + name(event.kind); }

void show_in(ProfileEvent& event, const Tensor& tensor) {
  constexpr size_t enough = 300;  // an optimizer is given all parameters
  event.device = tensor.device();
  std::string& text = event.shapes;
  if (text.size() > enough) {
    if (!text.ends_with("...")) text += ", ...";
    return;
  }
  text += std::string(text.empty() ? "" : ", ") + torus::name(tensor.dtype()) + " [";
  for (int axis = 0; axis < tensor.dim(); ++axis)
    text += (axis ? ", " : "") + std::to_string(tensor.size(axis));
  text += ']';
}

double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds / 1e9 : 0; }

std::string escaped(const std::string& text) {
  std::ostringstream out;
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out << '\\' << c;
    else if (static_cast<unsigned char>(c) < 0x20)
      out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << static_cast<int>(c) << std::dec;
    else
      out << c;
  }
  return out.str();
}

}  // namespace

const char* name(ScopeKind kind) {
  constexpr const char* names[] = {"user", "forward", "backward", "kernel", "device"};
  return names[static_cast<int>(kind)];
}

int64_t profile_clock() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

int profile_track(const std::string& name) {
  auto& [mutex, active, tracks] = shared();
  std::lock_guard lock(mutex);
  const auto found = std::find(tracks.begin(), tracks.end(), name);
  if (found != tracks.end()) return static_cast<int>(found - tracks.begin());
  tracks.push_back(name);
  return static_cast<int>(tracks.size()) - 1;
}

void add_profile_event(ProfileEvent event) {
  std::lock_guard lock(shared().mutex);
  if (shared().active) shared().active->events_.push_back(std::move(event));
}

// ------------------------------------------------------------------------------------------------- scopes

void ProfileScope::open(const char* name, ScopeKind kind) {
  std::string op;
  if (kind == ScopeKind::kernel) {
    const auto of = std::find_if(torus::open.rbegin(), torus::open.rend(), [](const OpenScope& outer) {
      return outer.event.kind == ScopeKind::forward || outer.event.kind == ScopeKind::backward;
    });
    if (of != torus::open.rend()) op = title(of->event);
  }
  OpenScope& scope = torus::open.emplace_back();
  scope.session = session.load(std::memory_order_relaxed);
  scope.event.name = name;
  scope.event.kind = kind;
  scope.event.op = std::move(op);
  depth_ = torus::open.size();
  scope.event.start = profile_clock();
}

void ProfileScope::close() {
  auto& scopes = torus::open;
  const int64_t now = profile_clock();
  if (depth_ > scopes.size()) return;  // one that it should have outlived is gone already, and took it along
  OpenScope scope = std::move(scopes[depth_ - 1]);
  scopes.resize(depth_ - 1);
  ProfileEvent& event = scope.event;
  event.end = now;
  if (!scopes.empty()) {
    ProfileEvent& outer = scopes.back().event;
    outer.inside += event.end - event.start;
    outer.flops += event.flops;
    outer.bytes += event.bytes;
  }
  if (scope.session == 0 || scope.session != session.load(std::memory_order_relaxed)) return;
  event.track = track_of_this_thread();
  event.live_bytes = memory_stats(event.device).live_bytes;
  add_profile_event(std::move(event));
}

void ProfileScope::show(const Tensor& tensor) {
  if (depth_ == 0 || depth_ > torus::open.size() || !tensor.defined()) return;
  show_in(torus::open[depth_ - 1].event, tensor);
}

void ProfileScope::add(const Tensor& tensor) {
  if (depth_ == 0 || depth_ > torus::open.size() || !tensor.defined()) return;
  show(tensor);
  double elements = 1;
  for (int axis = 0; axis < tensor.dim(); ++axis)
    if (tensor.strides()[axis] != 0 || tensor.size(axis) == 0)
      elements *= static_cast<double>(tensor.size(axis));
  torus::open[depth_ - 1].event.bytes += elements * static_cast<double>(size_of(tensor.dtype()));
}

void ProfileScope::add_flops(double flops) {
  if (depth_ > 0 && depth_ <= torus::open.size()) torus::open[depth_ - 1].event.flops += flops;
}

void detail::show_in_forward(const char* op, const Tensor& tensor) {
  if (open.empty() || !tensor.defined()) return;
  ProfileEvent& event = open.back().event;
  if (event.kind == ScopeKind::forward && event.name == op) show_in(event, tensor);
}

std::string detail::open_scopes() {
  std::string path;
  for (const OpenScope& scope : open)
    if (scope.event.kind == ScopeKind::user) path += (path.empty() ? "" : "/") + scope.event.name;
  return path;
}

// ----------------------------------------------------------------------------------------------- Profiler

namespace {
detail::DeviceProfiler device_profiler = {nullptr, nullptr};
}
void detail::set_device_profiler(DeviceProfiler profiler) { device_profiler = profiler; }

Profiler::Profiler() {
  static uint64_t sessions = 0;
  std::unique_lock lock(shared().mutex);
  check(!shared().active, Error::Kind::Value, "[profiler] expected one profiler at a time, got a second");
  shared().active = this;
  session = ++sessions;
  ++detail::scope_listeners;
  lock.unlock();
  if (device_profiler.start) device_profiler.start();
}

Profiler::~Profiler() { stop(); }

void Profiler::stop() {
  {
    std::lock_guard lock(shared().mutex);
    if (shared().active != this) return;
  }
  if (device_profiler.stop) device_profiler.stop();  // adds its events
  std::lock_guard lock(shared().mutex);
  shared().active = nullptr;
  session = 0;
  --detail::scope_listeners;
}

std::vector<ProfileEvent> Profiler::events() const {
  std::lock_guard lock(shared().mutex);
  return events_;
}

ProfileSummary Profiler::summary() const {
  using Row = ProfileSummary::Row;
  const std::vector<ProfileEvent> all = events();
  std::set<std::string> ops;  // that ended while recording; kernels of others stand for themselves
  for (const ProfileEvent& event : all)
    if (event.kind == ScopeKind::forward || event.kind == ScopeKind::backward) ops.insert(title(event));
  std::map<std::pair<std::string, std::string>, Row> rows;  // by title, and the name of a kernel inside
  double host = 0, device = 0;
  for (const ProfileEvent& event : all) {
    const bool inside = ops.contains(event.op);
    Row& row = rows[inside ? std::pair(event.op, event.name) : std::pair(title(event), std::string())];
    const double seconds = static_cast<double>(event.end - event.start) / 1e9,
                 own = static_cast<double>(event.end - event.start - event.inside) / 1e9;
    row.name = event.name;
    row.kind = event.kind;
    if (inside) row.op = event.op;
    ++row.calls;
    row.seconds += seconds;
    row.own_seconds += own;
    row.flops += event.flops;
    row.bytes += event.bytes;
    (event.kind == ScopeKind::device ? device : host) += own;
  }
  ProfileSummary summary;
  summary.device_seconds = device;
  std::vector<std::vector<Row>> groups;  // an op and its kernels, or one row
  for (auto& [key, row] : rows) {
    if (row.kind == ScopeKind::device && row.name != "memcpy" && row.name != "memset")
      summary.device_kernels += row.calls;
    if (row.op.empty())
      groups.emplace_back();
    else
      groups.back().front().own_seconds += row.own_seconds;
    groups.back().push_back(std::move(row));
  }
  const auto longer = [](const Row& a, const Row& b) { return a.own_seconds > b.own_seconds; };
  for (auto& group : groups) std::stable_sort(group.begin() + 1, group.end(), longer);
  std::stable_sort(groups.begin(), groups.end(),
                   [&](const auto& a, const auto& b) { return longer(a.front(), b.front()); });
  for (auto& group : groups)
    for (Row& row : group) {
      const double whole = row.kind == ScopeKind::device ? device : host;
      row.share = whole > 0 ? row.own_seconds / whole : 0;
      summary.rows.push_back(std::move(row));
    }
  return summary;
}

ProfileSummary::Row ProfileSummary::row(const std::string& name, ScopeKind kind) const {
  Row sum;
  sum.name = name;
  sum.kind = kind;
  for (const Row& row : rows) {
    if (row.name != name || row.kind != kind) continue;
    sum.calls += row.calls;
    sum.seconds += row.seconds;
    sum.own_seconds += row.own_seconds;
    sum.share += row.share;
    sum.flops += row.flops;
    sum.bytes += row.bytes;
  }
  check(sum.calls > 0, Error::Kind::Value, "[profiler] nothing of kind ", torus::name(kind), " is named \"",
        name, "\"");
  return sum;
}

std::ostream& operator<<(std::ostream& out, const ProfileSummary& summary) {
  size_t width = 4;
  const auto label = [](const ProfileSummary::Row& row) { return (row.op.empty() ? "" : "  ") + row.name; };
  for (const auto& row : summary.rows) width = std::max(width, label(row).size());
  std::ostringstream text;  // its own flags and locale
  text.imbue(std::locale::classic());
  text << std::fixed << std::left << std::setw(static_cast<int>(width)) << "name" << std::right
       << "  kind         calls    total ms     mean us  share %   GFLOP/s      GB/s\n";
  for (const auto& row : summary.rows) {
    text << std::left << std::setw(static_cast<int>(width)) << label(row) << "  " << std::setw(8)
         << name(row.kind) << std::right << std::setw(10) << row.calls << std::setprecision(3)
         << std::setw(12) << row.seconds * 1e3 << std::setprecision(1) << std::setw(12)
         << row.seconds * 1e6 / static_cast<double>(row.calls) << std::setw(9) << row.share * 100;
    for (const double amount : {row.flops, row.bytes}) {
      text << std::setw(10);
      if (amount > 0)
        text << rate(amount, row.seconds);
      else
        text << "";
    }
    text << '\n';
  }
  return out << text.str();
}

void Profiler::write_trace(const std::string& path) const {
  std::vector<ProfileEvent> all = events();
  std::vector<std::string> tracks;
  {
    std::lock_guard lock(shared().mutex);
    tracks = shared().tracks;
  }
  std::ofstream out(path);
  check(out.good(), Error::Kind::File, "[profiler] cannot write ", path);
  out.imbue(std::locale::classic());
  out << std::fixed << std::setprecision(3);
  int64_t origin = all.empty() ? 0 : all.front().start;
  std::map<int, bool> used;
  for (const ProfileEvent& event : all) origin = std::min(origin, event.start), used[event.track] = true;
  const auto microseconds = [](int64_t ns) { return static_cast<double>(ns) / 1e3; };

  out << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n"
      << R"({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "torus"}})";
  for (const auto& [track, _] : used)
    out << ",\n{\"ph\": \"M\", \"pid\": 1, \"tid\": " << track
        << R"(, "name": "thread_name", "args": {"name": ")" << escaped(tracks.at(static_cast<size_t>(track)))
        << "\"}}";
  for (const ProfileEvent& event : all) {
    const double seconds = static_cast<double>(event.end - event.start) / 1e9;
    out << ",\n{\"ph\": \"X\", \"pid\": 1, \"tid\": " << event.track
        << ", \"ts\": " << microseconds(event.start - origin)
        << ", \"dur\": " << microseconds(event.end - event.start) << ", \"cat\": \"" << name(event.kind)
        << "\", \"name\": \"" << escaped(event.name) << (event.kind == ScopeKind::backward ? " backward" : "")
        << "\", \"args\": {\"shapes\": \"" << escaped(event.shapes) << '"';
    out << std::setprecision(0);
    if (event.flops > 0) out << ", \"FLOP\": " << event.flops;
    if (event.bytes > 0) out << ", \"bytes\": " << event.bytes;
    out << std::setprecision(3);
    if (event.flops > 0) out << ", \"GFLOP/s\": " << rate(event.flops, seconds);
    if (event.bytes > 0) out << ", \"GB/s\": " << rate(event.bytes, seconds);
    out << "}}";
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.end < b.end; });
  std::map<std::pair<DeviceKind, int>, int64_t> shown;
  for (const ProfileEvent& event : all) {
    int64_t& last = shown.insert({{event.device.kind, event.device.index}, -1}).first->second;
    if (event.live_bytes < 0 || event.live_bytes == last) continue;
    last = event.live_bytes;
    out << ",\n{\"ph\": \"C\", \"pid\": 1, \"name\": \"memory " << event.device
        << "\", \"ts\": " << microseconds(event.end - origin) << ", \"args\": {\"live bytes\": " << last
        << "}}";
  }
  out << "\n]}\n";
  out.close();
  check(out.good(), Error::Kind::File, "[profiler] cannot write ", path);
}

}  // namespace torus
