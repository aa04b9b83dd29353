// Runs attention by every backend on one problem: kernels launched, time, memory, and a trace of all.
#include <torus/ops/attention/backend.h>
#include <torus/torus.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "flags.h"
#include "mask_flags.h"

using namespace torus;

namespace {

struct Options {
  int64_t batch = 1, heads = 8, kv_heads = 0, width = 64, repeats = 10;
  std::string dtype, trace;
  Device device = cpu;
  double dropout = 0, softcap = 0;
  bool any_order = false;
};

// What one pass of a backend took.
struct Cost {
  double milliseconds = 0;              // median
  int64_t bytes = 0;                    // the most held at once, without the operands
  std::optional<int64_t> kernels = {};  // that a device ran
};

struct Result {
  std::string name, refusal = {};
  std::optional<Cost> forward = {}, backward = {};
};

// A way to compute attention.
struct Candidate {
  std::string name;
  std::function<AttentionOutput(const Variable& q, const Variable& k, const Variable& v)> run;
  bool has_backward = true;
};

class Bench {
 public:
  Bench(const Options& options, const MaskFlags::Made& made, DType dtype, Device device)
      : options_(options), mask_(made.mask), device_(device) {
    const auto make = [&](int64_t heads, int64_t tokens) {
      return randn({options.batch, tokens, heads, options.width}, 0, 1, dtype).to(device).transpose(1, 2);
    };
    const int64_t kv_heads = options.kv_heads > 0 ? options.kv_heads : options.heads;
    q_ = make(options.heads, made.size.queries);
    k_ = make(kv_heads, made.size.keys), v_ = make(kv_heads, made.size.keys);
    d_out_ = make(options.heads, made.size.queries);
  }

  // The reference, the same in place, and the fused backends from the slowest to the fastest.
  std::vector<Candidate> candidates() const {
    std::vector<Candidate> all;
    const auto pinned = [&](Backend backend) {
      all.push_back({name(backend), [this, backend](const Variable& q, const Variable& k, const Variable& v) {
                       return attention(q, k, v, options_of(backend));
                     }});
    };
    pinned(Backend::reference);
    all.push_back({"in place",
                   [this](const Variable& q, const Variable& k, const Variable& v) {
                     return in_place(q.value(), k.value(), v.value());
                   },
                   false});
    const auto& fused = detail::attention_backends();
    for (auto backend = fused.rbegin(); backend != fused.rend(); ++backend) pinned(backend->id);
    return all;
  }

  // Untraced, so that tracing costs nothing here.
  Result measure(const Candidate& candidate) {
    Result result{candidate.name};
    try {
      result.forward.emplace(), result.backward.emplace();
      std::vector<double> forward, backward;
      for (int64_t i = 0; i <= options_.repeats; ++i) {
        run(candidate, [&](bool is_forward, double milliseconds, int64_t bytes) {
          if (i == 0) return;  // makes maps and plans
          (is_forward ? forward : backward).push_back(milliseconds);
          (is_forward ? result.forward : result.backward)->bytes = bytes;
        });
      }
      result.forward->milliseconds = median(forward);
      if (backward.empty())
        result.backward.reset();
      else
        result.backward->milliseconds = median(backward);
    } catch (const Error& error) {
      result = {candidate.name, error.what()};
    }
    release_cached_memory(device_);
    return result;
  }

  // Once more, all of those that can run under one profiler: counts kernels, and writes the trace.
  void trace(const std::vector<Candidate>& all, std::vector<Result>& results) {
    Profiler profiler;
    for (size_t i = 0; i < all.size(); ++i)
      if (results[i].forward) run(all[i], [](bool, double, int64_t) {});
    profiler.stop();
    if (!options_.trace.empty()) profiler.write_trace(options_.trace);
    const std::vector<ProfileEvent> events = profiler.events();
    const auto is_kernel = [](const ProfileEvent& event) {
      return event.kind == ScopeKind::device && event.name != "memcpy" && event.name != "memset";
    };
    if (std::none_of(events.begin(), events.end(), is_kernel)) return;
    const auto count = [&](const std::string& scope) {
      int64_t kernels = 0;
      for (const ProfileEvent& outer : events)
        if (outer.kind == ScopeKind::user && outer.name == scope)
          for (const ProfileEvent& event : events)
            kernels += is_kernel(event) && event.start >= outer.start && event.start < outer.end;
      return kernels;
    };
    for (Result& result : results) {
      if (result.forward) result.forward->kernels = count(result.name + " forward");
      if (result.backward) result.backward->kernels = count(result.name + " backward");
    }
  }

  // Which one is taken where none is asked for.
  std::string automatic() const {
    detail::AttentionProblem problem;
    problem.q = q_, problem.k = k_, problem.v = v_;
    problem.mask = mask_;
    problem.scale = 1 / std::sqrt(static_cast<double>(options_.width));
    problem.softcap = options_.softcap;
    problem.dropout.probability = static_cast<float>(options_.dropout);
    problem.deterministic = !options_.any_order;
    for (const auto& backend : detail::attention_backends())
      if (backend.refusal(problem).empty()) return name(backend.id);
    return "none";
  }

 private:
  AttentionOptions options_of(Backend backend) const {
    return {.mask = mask_,
            .softcap = options_.softcap,
            .dropout = options_.dropout,
            .deterministic = !options_.any_order,
            .backend = backend};
  }

  // Scores in one tensor of Nq x Nk, masked and made into weights where they stand.
  AttentionOutput in_place(const Tensor& q, const Tensor& k, const Tensor& v) const {
    check(options_.dropout == 0 && options_.softcap == 0, Error::Kind::Value,
          "it has no dropout and no softcap");
    if (!forbidden_.defined()) {
      forbidden_ = Tensor::empty({q.size(2), k.size(2)}, boolean);
      bool* to = forbidden_.mutable_data<bool>();
      for (int64_t i = 0; i < q.size(2); ++i)
        for (int64_t j = 0; j < k.size(2); ++j) *to++ = !mask_.allows(i, j, q.size(2), k.size(2));
      forbidden_ = forbidden_.to(device_);
    }
    const NoGrad only_values;
    const int64_t group = q.size(1) / k.size(1);
    const auto all_heads = [&](const Tensor& x) {
      return x.unsqueeze(2)
          .expand({x.size(0), x.size(1), group, x.size(2), x.size(3)})
          .reshape({x.size(0), x.size(1) * group, x.size(2), x.size(3)});
    };
    const Variable scaled = Variable(q) * (1 / std::sqrt(static_cast<double>(options_.width)));
    Tensor s = matmul(scaled, Variable(all_heads(k).transpose(2, 3))).value();
    softmax_(masked_fill_(s, forbidden_, -std::numeric_limits<double>::infinity()));
    return {matmul(Variable(s), Variable(all_heads(v))), {}};
  }

  template <class Note>
  void run(const Candidate& candidate, const Note& note) {
    const int64_t before = memory_stats(device_).live_bytes;
    // From here to the end of f, whose work has then ended.
    const auto timed = [&](bool is_forward, const auto& f) {
      synchronize(device_);
      reset_peak_memory(device_);
      const auto start = std::chrono::steady_clock::now();
      {
        const ProfileScope scope(candidate.name + (is_forward ? " forward" : " backward"));
        f();
        synchronize(device_);
      }
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      note(is_forward, time.count(), memory_stats(device_).peak_bytes - before);
    };
    Tape tape;
    const bool wants = candidate.has_backward;
    const Variable q(q_, wants), k(k_, wants), v(v_, wants);
    AttentionOutput output;
    timed(true, [&] { output = candidate.run(q, k, v); });
    if (wants) timed(false, [&] { tape.backward({output.out}, {d_out_}); });
  }

  static double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  }

  const Options& options_;
  Mask mask_;
  Device device_;
  Tensor q_, k_, v_, d_out_;
  mutable Tensor forbidden_;
};

void print(const std::vector<Result>& results) {
  std::printf("%-12s%-29s%s\n%-10s", "", "forward", "backward", "backend");
  for (int i = 0; i < 2; ++i) std::printf("  %7s  %8s  %8s", "kernels", "ms", "peak MiB");
  std::printf("\n");
  for (const Result& result : results) {
    std::printf("%-10s", result.name.c_str());
    if (!result.refusal.empty()) {
      std::printf("  %s\n", result.refusal.c_str());
      continue;
    }
    for (const auto& cost : {result.forward, result.backward}) {
      if (!cost) {
        std::printf("  %7s  %8s  %8s", "-", "-", "-");
        continue;
      }
      const std::string kernels = cost->kernels ? std::to_string(*cost->kernels) : "n/a";
      std::printf("  %7s  %8.3f  %8.1f", kernels.c_str(), cost->milliseconds,
                  double(cost->bytes) / (1 << 20));
    }
    std::printf("\n");
  }
}

int run(Options& options, const MaskFlags& flags) {
  if (!options.trace.empty()) check_can_save(options.trace);
  const Device device = options.device;
  if (options.dtype.empty()) options.dtype = device == cpu ? "f32" : "bf16";
  const DType dtype = options.dtype == "f64"   ? f64
                      : options.dtype == "f32" ? f32
                      : options.dtype == "f16" ? f16
                                               : bf16;
  const MaskFlags::Made made = flags.make();
  check(options.heads % std::max<int64_t>(options.kv_heads, 1) == 0, Error::Kind::Value,
        "--heads must be a multiple of --kv-heads, got ", options.heads, " and ", options.kv_heads);
  const MaskCosts costs = mask_costs(made.mask, made.size.queries, made.size.keys);
  Bench bench(options, made, dtype, device);
  std::printf(
      "%ld x %ld heads of %ld queries and %ld keys, width %ld, %s on %s; %.1f %% of the pairs are allowed\n",
      long(options.batch), long(options.heads), long(made.size.queries), long(made.size.keys),
      long(options.width), options.dtype.c_str(), device_name(device).c_str(),
      100 * double(costs.needed) / (double(made.size.queries) * double(made.size.keys)));

  const std::vector<Candidate> candidates = bench.candidates();
  std::vector<Result> results;
  for (const Candidate& candidate : candidates) results.push_back(bench.measure(candidate));
  bench.trace(candidates, results);
  print(results);
  std::printf("unless one is asked for: %s\n", bench.automatic().c_str());
  if (!options.trace.empty())
    std::printf("%s: a trace of one run of each, for https://ui.perfetto.dev\n", options.trace.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Runs attention by every backend on one problem, forward and backward: the kernels that a device runs, "
      "the\n"
      "median time of a call, the most memory held beside the operands, and one trace for ui.perfetto.dev.\n"
      "'reference' asks the mask pair by pair on the host, each time; 'in place' has the mask ready, one "
      "tensor of\n"
      "scores, and no backward. Examples:\n"
      "  profile_attention --device cuda --tokens 4096 --causal --trace trace.json\n"
      "  profile_attention --grid 16x16x16 --window 5 --boundary wrap --dtype f32"};
  Options options;
  const MaskFlags flags(app, 1024);
  app.add_option("--batch", options.batch, "sequences (1)")->check(above_0);
  app.add_option("--heads", options.heads, "heads of the queries (8)")->check(above_0);
  app.add_option("--kv-heads", options.kv_heads, "heads of keys and values (as many)")->check(above_0);
  app.add_option("--width", options.width, "channels of a head (64)")->check(above_0);
  app.add_option("--dtype", options.dtype, "f64, f32, f16 or bf16 (f32 on the CPU, bf16 on a CUDA device)")
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16"}));
  app.add_option("--dropout", options.dropout, "probability of dropping a weight")->check(from_0_to_1);
  app.add_option("--softcap", options.softcap, "limit of the scores")->check(at_least_0);
  app.add_flag("--any-order", options.any_order,
               "gradients may be added in any order, so that bits may differ");
  add_device(app, options.device);
  app.add_option("--repeats", options.repeats, "timed runs of each (10)")->check(above_0);
  app.add_option("--trace", options.trace, "file for a trace of one run of each");
  return run_program(app, argc, argv, "profile_attention", [&] { return run(options, flags); });
}
