#include "torus/core/profiler.h"

#include <gtest/gtest.h>

#include <array>
#include <cctype>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <thread>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "torus/core/gemm.h"
#include "torus/core/kernel.h"
#include "torus/core/random.h"

namespace torus {
namespace {

// A strict reader of JSON, so that a trace is known to be one.
struct Json {
  std::map<std::string, Json> members;
  std::vector<Json> items;
  std::string text;
  double number = 0;

  const Json& operator[](const std::string& key) const { return members.at(key); }
};

class JsonReader {
 public:
  explicit JsonReader(std::string text) : text_(std::move(text)) {}

  Json read() {
    Json result = value();
    skip();
    require(at_ == text_.size(), "the end");
    return result;
  }

 private:
  void require(bool condition, const char* expected) {
    check(condition, Error::Kind::Value, "expected ", expected, " at ", at_);
  }
  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  char peek() {
    skip();
    require(at_ < text_.size(), "more");
    return text_[at_];
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  std::string string() {
    require(take('"'), "a string");
    std::string result;
    while (at_ < text_.size() && text_[at_] != '"') {
      require(static_cast<unsigned char>(text_[at_]) >= 0x20, "an escape");
      if (text_[at_] != '\\') {
        result += text_[at_++];
        continue;
      }
      ++at_;
      if (text_[at_] == 'u') {
        result += static_cast<char>(std::stoi(text_.substr(at_ + 1, 4), nullptr, 16));
        at_ += 5;
      } else {
        require(text_[at_] == '"' || text_[at_] == '\\', "a known escape");
        result += text_[at_++];
      }
    }
    ++at_;
    return result;
  }
  Json value() {
    Json result;
    if (take('{')) {
      if (take('}')) return result;
      do {
        const std::string key = string();
        require(take(':'), "a colon");
        require(result.members.emplace(key, value()).second, "another key");
      } while (take(','));
      require(take('}'), "}");
    } else if (take('[')) {
      if (take(']')) return result;
      do result.items.push_back(value());
      while (take(','));
      require(take(']'), "]");
    } else if (peek() == '"') {
      result.text = string();
    } else {
      char* end = nullptr;
      result.number = std::strtod(text_.c_str() + at_, &end);
      require(std::isdigit(static_cast<unsigned char>(end[-1])), "a number");
      at_ = static_cast<size_t>(end - text_.c_str());
    }
    return result;
  }

  std::string text_;
  size_t at_ = 0;
};

// The trace's events by their "ph".
std::map<std::string, std::vector<Json>> trace(const Profiler& profiler) {
  const TemporaryFolder folder;
  const std::string path = folder / "trace.json";
  profiler.write_trace(path);
  std::map<std::string, std::vector<Json>> result;
  const Json all = JsonReader(read_file(path)).read();
  for (const Json& event : all["traceEvents"].items) result[event["ph"].text].push_back(event);
  return result;
}

const Kernel<void(Tensor&, const Tensor&, double)> scale{
    "test.scale",
    [](Tensor& y, const Tensor& x, double by) {
      for (int64_t i = 0; i < x.numel(); ++i) y.mutable_data<float>()[i] = static_cast<float>(by);
    },
    [](Tensor&, const Tensor& x, double) { return static_cast<double>(x.numel()); }};
const Kernel<void(int&)> no_tensor{"test.no_tensor", [](int& value) { ++value; }};

void run_product() {
  Tensor c = Tensor::empty({2, 5, 7});
  product(c, randn({2, 5, 3}), randn({3, 7}));
}

TEST(Profiler, CountsCallsFlopsAndBytes) {
  Tensor y = Tensor::empty({4, 6});
  const Tensor row = randn({6}), x = row.expand({4, 6});
  int value = 0;
  Profiler profiler;
  for (int i = 0; i < 3; ++i) scale(cpu, y, x, 2);
  scale(cpu, y, Tensor::zeros({0, 6}), 2);
  run_product();
  no_tensor(cpu, value);
  EXPECT_EQ(value, 1);

  const ProfileSummary summary = profiler.summary();
  const auto& scaled = summary.row("test.scale");
  EXPECT_EQ(scaled.calls, 4);
  EXPECT_EQ(scaled.flops, 3 * 24);
  EXPECT_EQ(scaled.bytes, 4 * (4 * 24) + 3 * (4 * 6));  // an expanded axis is read once, an empty one never
  EXPECT_GT(scaled.seconds, 0);
  const auto& multiplied = summary.row("product");
  EXPECT_EQ(multiplied.calls, 1);
  EXPECT_EQ(multiplied.flops, 2. * 2 * 5 * 7 * 3);
  EXPECT_EQ(multiplied.bytes, 4 * (2 * 5 * 7 + 2 * 5 * 3 + 3 * 7));
  EXPECT_EQ(summary.row("test.no_tensor").bytes, 0);
  EXPECT_ERROR(summary.row("absent"), Value, "[profiler] nothing of kind kernel is named \"absent\"");
}

TEST(Profiler, ScopesNestAndSharesAddUp) {
  Profiler profiler;
  {
    const ProfileScope epoch("epoch");
    for (int i = 0; i < 2; ++i) {
      const ProfileScope step(std::string("step"));
      run_product();
    }
  }
  const ProfileSummary summary = profiler.summary();
  const auto &epoch = summary.row("epoch", ScopeKind::user), &step = summary.row("step", ScopeKind::user);
  EXPECT_EQ(step.calls, 2);
  EXPECT_GE(epoch.seconds, step.seconds);
  EXPECT_NEAR(epoch.own_seconds, epoch.seconds - step.seconds, 1e-12);
  EXPECT_EQ(epoch.flops, 2 * 2. * 2 * 5 * 7 * 3);
  EXPECT_GE(epoch.bytes, summary.row("product").bytes);
  double share = 0, own = 0;
  for (const auto& row : summary.rows) share += row.share, own += row.own_seconds;
  EXPECT_NEAR(share, 1, 1e-12);
  EXPECT_NEAR(own, epoch.seconds, 1e-9);
  // An event ends inside what it began in.
  std::vector<ProfileEvent> events = profiler.events();
  EXPECT_EQ(events.back().name, "epoch");
  for (const ProfileEvent& event : events) {
    EXPECT_GE(event.start, events.back().start);
    EXPECT_LE(event.end, events.back().end);
    EXPECT_EQ(event.track, events.back().track);
  }

  std::ostringstream text;
  text << summary;
  std::istringstream lines(text.str());
  std::string line;
  std::getline(lines, line);
  EXPECT_NE(line.find("calls    total ms     mean us  share %   GFLOP/s      GB/s"), std::string::npos)
      << line;
  int count = 0;
  while (std::getline(lines, line)) {
    EXPECT_LE(line.size(), 110u);
    ++count;
  }
  EXPECT_EQ(count, static_cast<int>(summary.rows.size()));
}

// A kernel is part of the innermost op around it, and its time is the op's own.
TEST(Profiler, KernelsArePartsOfTheirOp) {
  Tensor y = Tensor::empty({3});
  const Tensor x = Tensor::zeros({3});
  Profiler profiler;
  {
    const ProfileScope step("step");
    {
      const ProfileScope outer("einsum", ScopeKind::forward);
      scale(cpu, y, x, 1);
      const ProfileScope inner("matmul", ScopeKind::forward);
      detail::show_in_forward("einsum", x);  // not the innermost
      detail::show_in_forward("matmul", x);
      run_product();
    }
    {
      const ProfileScope node("matmul", ScopeKind::backward);
      const ProfileScope named("half");
      run_product();
      run_product();
    }
    run_product();
  }
  const ProfileSummary summary = profiler.summary();
  std::map<std::string, double> own;
  double total = 0;
  std::string title;
  for (const auto& row : summary.rows) {
    if (row.op.empty()) {
      title = row.name + ' ' + name(row.kind);
      total += row.share;
    } else {
      EXPECT_EQ(row.kind, ScopeKind::kernel);
      EXPECT_EQ(row.op, title) << "kernels follow their op";
      EXPECT_LE(row.own_seconds, own[row.op]);
    }
    own[title + (row.op.empty() ? "" : "/" + row.name)] = row.own_seconds;
  }
  EXPECT_NEAR(total, 1, 1e-12);
  for (const char* expected :
       {"einsum forward/test.scale", "matmul forward/product", "matmul backward/product", "product kernel"})
    EXPECT_TRUE(own.contains(expected)) << expected;
  EXPECT_FALSE(own.contains("einsum forward/product"));
  EXPECT_EQ(summary.row("product").calls, 4);
  EXPECT_EQ(summary.row("einsum", ScopeKind::forward).flops,
            summary.row("matmul", ScopeKind::forward).flops + 3);
  for (const ProfileEvent& event : profiler.events()) {
    if (event.kind == ScopeKind::forward) {
      EXPECT_EQ(event.shapes, event.name == "matmul" ? "f32 [3]" : "");
    }
  }

  // An op that recording did not see end has no row; its kernels have.
  profiler.stop();
  std::optional<Profiler> second(std::in_place);
  const ProfileScope open("matmul", ScopeKind::forward);
  scale(cpu, y, x, 1);
  second->stop();
  ASSERT_EQ(second->summary().rows.size(), 1u);
  EXPECT_EQ(second->summary().rows[0].op, "");
  EXPECT_EQ(second->summary().rows[0].share, 1);
}

struct Moment {
  Tensor value, absent;
  std::array<Tensor, 2> tensors() const { return {value, absent}; }
};
const Kernel<void(std::span<const Tensor>)> of_list{"test.of_list", [](std::span<const Tensor>) {}};
const Kernel<void(std::vector<Moment>&)> of_structs{"test.of_structs", [](std::vector<Moment>&) {}};

TEST(Profiler, CountsTheTensorsOfLists) {
  const std::vector<Tensor> list(100, Tensor::zeros({2, 3}));
  std::vector<Moment> structs{{list[0], {}}, {list[1], {}}};
  Profiler profiler;
  of_list(cpu, list);
  of_structs(cpu, structs);
  const ProfileSummary summary = profiler.summary();
  EXPECT_EQ(summary.row("test.of_list").bytes, 100 * 24);
  EXPECT_EQ(summary.row("test.of_structs").bytes, 2 * 24);
  for (const ProfileEvent& event : profiler.events()) {
    EXPECT_LT(event.shapes.size(), 320u);
    EXPECT_EQ(event.shapes.ends_with("f32 [2, 3], ..."), event.name == "test.of_list") << event.shapes;
  }
}

TEST(Profiler, RecordsOnlyWhileOn) {
  {
    const ProfileScope before("before");
    EXPECT_FALSE(before);
  }
  auto early = std::make_unique<ProfileScope>("early");
  auto profiler = std::make_unique<Profiler>();
  EXPECT_ERROR(Profiler(), Value, "[profiler] expected one profiler at a time, got a second");
  early.reset();
  EXPECT_TRUE(profiler->events().empty());
  auto late = std::make_unique<ProfileScope>("late");
  EXPECT_TRUE(*late);
  { const ProfileScope inner("inner"); }
  profiler->stop();
  EXPECT_FALSE(ProfileScope("after"));
  profiler->stop();
  ASSERT_EQ(profiler->events().size(), 1u);
  EXPECT_EQ(profiler->events()[0].name, "inner");
  // A scope that one profiler left open says nothing to the next.
  profiler.reset();
  profiler = std::make_unique<Profiler>();
  late.reset();
  EXPECT_TRUE(profiler->events().empty());
  EXPECT_EQ(detail::scope_listeners, 1);
  profiler.reset();
  EXPECT_EQ(detail::scope_listeners, 0);
}

TEST(Profiler, ScopesThatEndInAnotherOrder) {
  Profiler profiler;
  auto outer = std::make_unique<ProfileScope>("outer"), inner = std::make_unique<ProfileScope>("inner");
  outer.reset();
  inner->add_flops(1);
  inner->add(Tensor::zeros({2}));
  inner.reset();
  { const ProfileScope next("next"); }
  const auto events = profiler.events();
  ASSERT_EQ(events.size(), 3u);  // "outer", the filling of zeros, "next"
  EXPECT_EQ(events[0].name, "outer");
  EXPECT_EQ(events[2].name, "next");
}

TEST(Profiler, EndsScopesThatAnErrorLeaves) {
  Profiler profiler;
  Tensor c = Tensor::empty({2, 2});
  EXPECT_ERROR(
      {
        const ProfileScope step("step");
        product(c, randn({2, 2}), randn({3, 2}));
      },
      Shape, "[product]");
  EXPECT_EQ(profiler.summary().row("step", ScopeKind::user).calls, 1);
  EXPECT_EQ(detail::open_scopes(), "");
}

TEST(Profiler, WritesATrace) {
  Profiler profiler;
  Tensor held;
  {
    const ProfileScope scope("a \"name\"\\\n");
    held = Tensor::zeros({1000});
    run_product();
  }
  int value = 0;
  no_tensor(cpu, value);  // memory is as it was
  no_tensor(cpu, value);
  auto events = trace(profiler);
  const auto& spans = events["X"];
  ASSERT_EQ(spans.size(), profiler.events().size());
  const Json *scope = nullptr, *multiplied = nullptr;
  for (const Json& span : spans) {
    if (span["name"].text == "a \"name\"\\\n") scope = &span;
    if (span["name"].text == "product") multiplied = &span;
  }
  ASSERT_TRUE(scope && multiplied);
  EXPECT_EQ((*scope)["cat"].text, "user");
  EXPECT_EQ((*multiplied)["cat"].text, "kernel");
  EXPECT_EQ((*scope)["ts"].number, 0);  // the first
  EXPECT_GE((*multiplied)["ts"].number, 0);
  EXPECT_LE((*multiplied)["ts"].number + (*multiplied)["dur"].number, (*scope)["dur"].number + 1e-3);
  EXPECT_EQ((*multiplied)["tid"].number, (*scope)["tid"].number);
  EXPECT_EQ((*multiplied)["args"]["FLOP"].number, 420);
  EXPECT_EQ((*multiplied)["args"]["bytes"].number, 484);
  EXPECT_EQ((*multiplied)["args"]["shapes"].text, "f32 [2, 5, 7], f32 [2, 5, 3], f32 [2, 3, 7]");
  EXPECT_GT((*multiplied)["args"]["GFLOP/s"].number, 0);
  // Memory over time, and the names of the tracks.
  std::vector<double> live;
  for (const Json& counter : events["C"]) {
    EXPECT_EQ(counter["name"].text, "memory cpu");
    live.push_back(counter["args"]["live bytes"].number);
  }
  ASSERT_FALSE(live.empty());
  EXPECT_EQ(live.back(), static_cast<double>(memory_stats().live_bytes));
  for (size_t i = 1; i < live.size(); ++i) EXPECT_NE(live[i], live[i - 1]);
  ASSERT_EQ(events["M"].size(), 2u);
  EXPECT_EQ(events["M"][1]["name"].text, "thread_name");
  EXPECT_EQ(events["M"][1]["tid"].number, (*scope)["tid"].number);

  EXPECT_ERROR(profiler.write_trace("/no/such/folder/trace.json"), File,
               "[profiler] cannot write /no/such/folder/trace.json");
  profiler.stop();
  EXPECT_EQ(trace(profiler)["X"].size(), spans.size());  // what was recorded stays
}

TEST(Profiler, WritesAnEmptyTrace) {
  const Profiler profiler;
  EXPECT_TRUE(trace(profiler)["X"].empty());
  EXPECT_TRUE(profiler.summary().rows.empty());
}

// What a device timed itself comes on a track of its own.
TEST(Profiler, TakesTheTracksOfDevices) {
  const int stream = profile_track("cuda:0 stream 0");
  EXPECT_EQ(profile_track("cuda:0 stream 0"), stream);
  EXPECT_NE(profile_track("cuda:0 stream 1"), stream);
  add_profile_event({.name = "ignored"});
  Profiler profiler;
  const int64_t now = profile_clock();
  run_product();
  add_profile_event({.name = "layer_norm.forward",
                     .kind = ScopeKind::device,
                     .track = stream,
                     .start = now + 1000,
                     .end = now + 3000,
                     .flops = 4000,
                     .device = {DeviceKind::cuda, 0}});
  const ProfileSummary summary = profiler.summary();
  const auto& row = summary.row("layer_norm.forward", ScopeKind::device);
  EXPECT_EQ(row.seconds, 2e-6);
  EXPECT_EQ(row.share, 1);  // of the time of devices
  double host = 0;
  for (const auto& other : summary.rows) host += other.kind == ScopeKind::device ? 0 : other.share;
  EXPECT_NEAR(host, 1, 1e-12);
  EXPECT_ERROR(summary.row("ignored", ScopeKind::user), Value, "nothing");

  auto events = trace(profiler);
  int found = 0;
  for (const Json& span : events["X"])
    if (span["tid"].number == stream) {
      ++found;
      EXPECT_EQ(span["name"].text, "layer_norm.forward");
      EXPECT_EQ(span["dur"].number, 2);
      EXPECT_EQ(span["args"]["GFLOP/s"].number, 2);
    }
  EXPECT_EQ(found, 1);
  bool named = false;
  for (const Json& name : events["M"]) named |= name["args"]["name"].text == "cuda:0 stream 0";
  EXPECT_TRUE(named);
  for (const Json& counter : events["C"])
    EXPECT_EQ(counter["name"].text, "memory cpu");  // none is known there
}

TEST(Profiler, ManyThreads) {
  constexpr int threads = 4, rounds = 200;
  std::vector<std::thread> all;
  Profiler profiler;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([] {
      Tensor y = Tensor::empty({3});
      const Tensor x = Tensor::zeros({3});
      for (int i = 0; i < rounds; ++i) {
        const ProfileScope scope("round");
        scale(cpu, y, x, 1);
      }
    });
  while (profiler.events().size() < threads * rounds) std::this_thread::yield();  // reading meanwhile
  for (auto& thread : all) thread.join();
  EXPECT_EQ(profiler.summary().row("round", ScopeKind::user).calls, threads * rounds);
  EXPECT_EQ(profiler.summary().row("test.scale").flops, threads * rounds * 3);
  std::map<int, std::vector<ProfileEvent>> tracks;
  for (const ProfileEvent& event : profiler.events()) tracks[event.track].push_back(event);
  EXPECT_EQ(tracks.size(), static_cast<size_t>(threads));
  for (const auto& [track, events] : tracks) {
    EXPECT_EQ(events.size(), 1u + 2 * rounds);
    for (size_t i = 2; i < events.size(); i += 2) {  // each kernel inside its own thread's round
      EXPECT_EQ(events[i].name, "round");
      EXPECT_GE(events[i - 1].start, events[i].start);
      EXPECT_EQ(events[i].inside, events[i - 1].end - events[i - 1].start);
    }
  }
}

// Starting and stopping while other threads open and close scopes.
TEST(Profiler, StartsAndStopsWhileOthersRun) {
  std::atomic<bool> done{false};
  std::vector<std::thread> all;
  for (int t = 0; t < 2; ++t)
    all.emplace_back([&] {
      Tensor y = Tensor::empty({3});
      const Tensor x = Tensor::zeros({3});
      while (!done) {
        const ProfileScope scope("round");
        scale(cpu, y, x, 1);
        std::this_thread::yield();
      }
    });
  for (int i = 0; i < 50; ++i) {
    Profiler profiler;
    std::this_thread::yield();
    profiler.stop();
    const size_t count = profiler.events().size();
    std::this_thread::yield();
    EXPECT_EQ(profiler.events().size(), count);
  }
  done = true;
  for (auto& thread : all) thread.join();
  EXPECT_EQ(detail::scope_listeners, 0);
}

}  // namespace
}  // namespace torus
