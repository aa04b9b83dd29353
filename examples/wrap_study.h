// train_mri --study wrap: does it matter whether attention windows wrap around? A demonstration on phantoms.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "picture.h"
#include "restoration.h"
#include "training.h"

/// How much is computed: the larger one is for a CUDA device.
struct StudySize {
  std::array<int64_t, 3> grid, patch, window;
  int64_t slices, train, test, layers, heads, width, batch, steps;
  double lr;
};
constexpr StudySize small_study{{8, 64, 96}, {1, 4, 4}, {3, 5, 5}, 2, 32, 4, 2, 4, 64, 1, 600, 0.004};
constexpr StudySize large_study{{16, 128, 192}, {1, 4, 4}, {3, 7, 7}, 8, 64, 4, 3, 4, 128, 2, 2000, 0.002};
constexpr int64_t study_seeds = 5;

inline std::string wrap_study_text() {
  const auto size = [](const StudySize& s) {
    return format(
        "grid %ld x %ld x %ld, tokens of %ld x %ld x %ld voxels, windows of %ld x %ld x %ld tokens, %ld "
        "layers of %ld "
        "channels, %ld phantoms to train on and %ld to test on, %ld steps of %ld slabs",
        long(s.grid[0]), long(s.grid[1]), long(s.grid[2]), long(s.patch[0]), long(s.patch[1]),
        long(s.patch[2]), long(s.window[0]), long(s.window[1]), long(s.window[2]), long(s.layers),
        long(s.width), long(s.train), long(s.test), long(s.steps), long(s.batch));
  };
  return "--study wrap: phantoms, undersampled along x by a random mask (4-fold, 8 % of the middle). "
         "Networks with as "
         "many parameters, whose windows wrap around in x or shift inward at its ends, are trained in pairs "
         "of equal "
         "seeds: initial weights, slabs and masks are the same, " +
         std::to_string(study_seeds) +
         " seeds. A third trains the shifted ones on phantoms that are rolled at random, which a wrapped "
         "network does "
         "not need. As a control, windows of 4 tokens with dilation 1/4 of the axis and no position code: "
         "then both "
         "see the same keys.\n"
         "On the CPU: " +
         size(small_study) + ". With --device cuda: " + size(large_study) +
         ".\n"
         "Expected, before it was run: a wrapped network restores a volume rolled by whole patches exactly "
         "as well, to "
         "rounding. At shift 0, with air at the seam, both are as good. Where anatomy crosses the seam the "
         "shifted one "
         "loses, near the seam (as far as its layers see) and not inside; training on rolled phantoms gets "
         "some of it "
         "back. The two controls differ by no more than rounding grows to while training. Phantoms are a "
         "demonstration: nothing is claimed about patients.";
}

namespace wrap_study {

using namespace torus;

struct Arm {
  const char* name;
  bool wraps, rolled, control;
  Color color;
};
constexpr Arm arms[] = {{"wrap", true, false, false, {0, 90, 200}},
                        {"shift", false, false, false, {220, 90, 0}},
                        {"shift, trained rolled", false, true, false, {120, 120, 120}},
                        {"control, wrap", true, false, true, {0, 0, 0}},
                        {"control, shift", false, false, true, {0, 0, 0}}};
constexpr size_t arm_count = std::size(arms), plotted = 3;

/// Of one trained network; dB.
struct Outcome {
  double equivariance = 0;        // before training
  std::vector<double> psnr;       // at each shift
  double band = 0, interior = 0;  // mean over the shifts by whole patches
};

inline Problem problem_of(const StudySize& size) {
  return {{false, false, true}, {Sampling::random, 4, 0.08}, size.slices, size.patch};
}

inline RestorerOptions network_of(const StudySize& size, const Arm& arm) {
  NeighborhoodAttentionOptions attention{.channels = size.width,
                                         .heads = size.heads,
                                         .window = {size.window.begin(), size.window.end()},
                                         .boundary = {shift, shift, arm.wraps ? torus::wrap : shift}};
  if (arm.control) {
    attention.window[2] = 4;
    attention.dilation = {1, 1, size.grid[2] / size.patch[2] / 4};
    attention.rotary = false;
  }
  const Problem problem = problem_of(size);
  return {.network = network_options(problem, attention, size.layers), .axes = problem.axes()};
}

/// Shifts along x, from 0 to the whole axis: whole patches, and one and a half times a patch beside them.
inline std::vector<int64_t> shifts_of(const StudySize& size) {
  std::vector<int64_t> result;
  const int64_t length = size.grid[2], patch = size.patch[2];
  for (int64_t i = 0; i < 8; ++i) {
    result.push_back(i * length / 8 / patch * patch);
    result.push_back(result.back() + 3 * patch / 2);
  }
  return result;
}

/// |f(x rolled) rolled back - f(x)| over what the network added to x, for a roll by half the axis.
inline double equivariance_error(const Restorer& model, const Scan& scan, const Problem& problem,
                                 Device device) {
  const NoGrad no_grad;
  const Variable image(scan.slab(0, 0, 0, problem.slices).to(device).unsqueeze(0));
  const Tensor mask = problem.mask(scan, {1}).to(device).unsqueeze(0);
  const int64_t by = scan.grid[2] / 2 / problem.patch[2] * problem.patch[2];
  const auto restored = [&](const Variable& x) { return model({fft(x, problem.axes()).value(), mask}); };
  const Variable here = restored(image), there = roll(restored(roll(image, {by}, {3})), {-by}, {3});
  const Variable filled = fft(fft(image, problem.axes()) * Variable(mask), problem.axes(), true);
  const auto norm = [](const Variable& x) { return std::sqrt(sum(x * x).item()); };
  return norm(there - here) / norm(here - filled);
}

/// PSNR of the columns within `reach` of the seam, after a roll by `shift`, and of the others.
inline std::array<double, 2> band_and_interior(const Restored& frame, int64_t by, int64_t reach) {
  const auto truth = frame.truth.to_vector<double>(), restored = frame.restored.to_vector<double>();
  const int64_t length = frame.truth.size(2);
  double error[2] = {}, count[2] = {};
  for (size_t i = 0; i < truth.size(); ++i) {
    const int64_t column = (static_cast<int64_t>(i) + by) % length;
    const size_t part = std::min(column, length - 1 - column) < reach ? 0 : 1;
    error[part] += (restored[i] - truth[i]) * (restored[i] - truth[i]);
    ++count[part];
  }
  const double peak = *std::max_element(truth.begin(), truth.end());
  return {10 * std::log10(peak * peak * count[0] / error[0]),
          10 * std::log10(peak * peak * count[1] / error[1])};
}

/// How far layers see from the seam, in voxels.
inline int64_t reach_of(const StudySize& size) { return size.layers * (size.window[2] / 2) * size.patch[2]; }

inline void evaluate(Outcome& outcome, const Restorer& model, const StudySize& size,
                     const std::vector<std::shared_ptr<const Scan>>& test, Device device) {
  const Problem problem = problem_of(size);
  const double share = 1 / static_cast<double>(test.size());
  const std::vector<int64_t> shifts = shifts_of(size);
  outcome.psnr.assign(shifts.size(), 0);
  for (const auto& scan : test)
    for (size_t i = 0; i < shifts.size(); ++i) {
      const Restored frame = restore_frame(model, *scan, problem, 0, device, shifts[i]);
      outcome.psnr[i] += share * psnr(frame.truth, frame.restored);
      if (shifts[i] % size.patch[2] != 0) continue;
      const auto [band, interior] = band_and_interior(frame, shifts[i], reach_of(size));
      outcome.band += 2 * share / static_cast<double>(shifts.size()) * band;
      outcome.interior += 2 * share / static_cast<double>(shifts.size()) * interior;
    }
}

inline Outcome train_and_evaluate(const Arm& arm, uint64_t seed, const StudySize& size,
                                  const std::vector<std::shared_ptr<const Scan>>& train,
                                  const std::vector<std::shared_ptr<const Scan>>& test, Device device,
                                  double& last_loss) {
  manual_seed(seed);
  const Problem problem = problem_of(size);
  Restorer model(network_of(size, arm));
  model.to(device);
  Outcome outcome;
  outcome.equivariance = equivariance_error(model, *test[0], problem, device);
  AdamW optimizer(model.named_parameters(), {.beta2 = 0.99, .weight_decay = 0.01});
  SlabTrainer trainer(model, optimizer, device);
  const SlabSource source(train, problem, size.batch, seed, arm.rolled);
  Prefetcher batches([&](int64_t index) {
    const Slabs slabs = source(index);
    return Batch{slabs.frequencies, slabs.masks};
  });
  double sum = 0;
  int64_t counted = 0;
  for (int64_t step = 0; step < size.steps; ++step) {
    const Batch batch = batches.next();
    trainer.step({batch.inputs, batch.targets}, warmup_cosine(step, size.steps / 20, size.steps, size.lr));
    if (!trainer.full() && step + 1 < size.steps) continue;
    for (const double loss : trainer.losses())
      if (step >= size.steps * 9 / 10) sum += loss, ++counted;
  }
  last_loss = sum / static_cast<double>(std::max<int64_t>(1, counted));
  evaluate(outcome, model, size, test, device);
  return outcome;
}

struct Statistic {
  double mean, deviation;
};
inline Statistic statistic(const std::vector<double>& values) {
  double mean = 0, squares = 0;
  for (const double v : values) mean += v / static_cast<double>(values.size());
  for (const double v : values) squares += (v - mean) * (v - mean);
  return {mean, std::sqrt(squares / static_cast<double>(values.size() - 1))};
}

using Outcomes = std::vector<Outcome>;  // one a seed

inline void print_table(const std::vector<Outcomes>& results, const StudySize& size, double zero_filled,
                        int64_t parameters) {
  const std::pair<std::string, double (*)(const Outcome&)> columns[] = {
      {"shift 0", [](const Outcome& o) { return o.psnr[0]; }},
      {"mean of all",
       [](const Outcome& o) {
         return std::accumulate(o.psnr.begin(), o.psnr.end(), 0.) / static_cast<double>(o.psnr.size());
       }},
      {"worst of all", [](const Outcome& o) { return *std::min_element(o.psnr.begin(), o.psnr.end()); }},
      {"near the seam", [](const Outcome& o) { return o.band; }},
      {"elsewhere", [](const Outcome& o) { return o.interior; }}};
  std::printf(
      "\nPSNR in dB, mean over %ld seeds (standard deviation), at %ld shifts along x; near the seam: within "
      "the %ld "
      "voxels\nthat %ld layers see, and elsewhere, at shifts by whole patches; %ld parameters each; "
      "zero-filled %.2f\n",
      long(study_seeds), long(shifts_of(size).size()), long(reach_of(size)), long(size.layers),
      long(parameters), zero_filled);
  const auto row = [&](const char* title, const std::string& first, auto text) {
    std::printf("%-22s %10s", title, first.c_str());
    for (const auto& [name, value] : columns) std::printf(" %14s", text(name, value).c_str());
    std::printf("\n");
  };
  row("windows in x", "not equiv.", [](const std::string& name, auto) { return name; });
  for (size_t a = 0; a < arm_count; ++a) {
    double error = 0;
    for (const Outcome& o : results[a]) error = std::max(error, o.equivariance);
    row(arms[a].name, format("%.1e", error), [&](const std::string&, auto value) {
      std::vector<double> values;
      for (const Outcome& o : results[a]) values.push_back(value(o));
      const auto [mean, deviation] = statistic(values);
      return format("%.2f (%.2f)", mean, deviation);
    });
  }
  std::printf("differences of pairs, and in how many of the %ld seeds they are positive\n",
              long(study_seeds));
  const auto difference = [&](const char* title, size_t a, size_t b) {
    row(title, "", [&](const std::string&, auto value) {
      std::vector<double> values;
      for (size_t s = 0; s < results[a].size(); ++s)
        values.push_back(value(results[a][s]) - value(results[b][s]));
      const auto [mean, deviation] = statistic(values);
      return format("%+.2f (%.2f) %ld", mean, deviation,
                    long(std::count_if(values.begin(), values.end(), [](double v) { return v > 0; })));
    });
  };
  difference("wrap - shift", 0, 1);
  difference("wrap - trained rolled", 0, 2);
  difference("control, wrap - shift", 3, 4);
}

/// PSNR against shift: thin lines are seeds, thick ones their means.
inline void draw(const std::vector<Outcomes>& results, const StudySize& size, const std::string& path) {
  constexpr int64_t width = 720, height = 440, left = 70, right = 20, top = 50, bottom = 50;
  constexpr Color black{0, 0, 0}, grey{225, 225, 225};
  const std::vector<int64_t> shifts = shifts_of(size);
  double low = INFINITY, high = -INFINITY;
  for (size_t a = 0; a < plotted; ++a)
    for (const Outcome& o : results[a])
      for (const double p : o.psnr) low = std::min(low, p), high = std::max(high, p);
  const double span = std::max(high - low, 0.1), step = span > 4     ? 1
                                                        : span > 1.5 ? 0.5
                                                        : span > 0.6 ? 0.2
                                                                     : 0.05;
  low = std::floor(low / step) * step;
  high = std::ceil(high / step) * step;
  Picture picture(width, height, {255, 255, 255});
  const auto x_of = [&](double shift) {
    return left + shift / static_cast<double>(size.grid[2]) * (width - left - right);
  };
  const auto y_of = [&](double value) {
    return top + (high - value) / (high - low) * (height - top - bottom);
  };
  for (double tick = low; tick < high + step / 2; tick += step) {
    picture.line(left, y_of(tick), width - right, y_of(tick), 1, grey);
    picture.text(left - 52, std::lround(y_of(tick)) - 5, format("%6.2f", tick), black);
  }
  for (int64_t i = 0; i <= 8; ++i) {
    const int64_t shift = i * size.grid[2] / 8;
    picture.line(x_of(double(shift)), top, x_of(double(shift)), height - bottom, 1, grey);
    picture.text(std::lround(x_of(double(shift))) - 8, height - bottom + 8, std::to_string(shift), black);
  }
  picture.text(left, height - 22, "circular shift along x in voxels", black);
  picture.text(left, 10, "PSNR in dB of phantoms to test on", black);
  int64_t legend = left;
  for (size_t a = 0; a < plotted; ++a) {
    picture.rectangle(legend, 34, 14, 4, arms[a].color);
    picture.text(legend + 20, 31, arms[a].name, arms[a].color);
    legend += 60 + 8 * static_cast<int64_t>(std::string(arms[a].name).size());
  }
  for (size_t a = 0; a < plotted; ++a) {
    const auto curve = [&](auto value, int64_t thickness, Color color) {
      for (size_t i = 0; i < shifts.size(); ++i) {  // around: the last joins the first, one axis further
        const size_t next = (i + 1) % shifts.size();
        picture.line(x_of(double(shifts[i])), y_of(value(i)),
                     x_of(double(next == 0 ? size.grid[2] : shifts[next])), y_of(value(next)), thickness,
                     color);
      }
    };
    Color pale = arms[a].color;
    for (auto& part : pale) part = static_cast<unsigned char>(255 - (255 - part) * 2 / 5);
    for (const Outcome& o : results[a]) curve([&](size_t i) { return o.psnr[i]; }, 1, pale);
    curve(
        [&](size_t i) {
          double mean = 0;
          for (const Outcome& o : results[a]) mean += o.psnr[i] / static_cast<double>(results[a].size());
          return mean;
        },
        3, arms[a].color);
  }
  picture.write(path);
  std::printf("wrote %s: PSNR against shift; thin lines are seeds, thick ones their means\n", path.c_str());
}

}  // namespace wrap_study

inline void run_wrap_study(const StudySize& size, torus::Device device, const std::string& png,
                           const std::string& log_path) {
  using namespace wrap_study;
  JsonLog log(log_path, false);
  const auto begin = std::chrono::steady_clock::now();
  const auto phantoms = [&](int64_t count, uint64_t first) {
    std::vector<std::shared_ptr<const Scan>> result;
    for (int64_t i = 0; i < count; ++i)
      result.push_back(std::make_shared<PhantomScan>(Shape{size.grid[0], size.grid[1], size.grid[2]},
                                                     first + static_cast<uint64_t>(i)));
    return result;
  };
  const auto train = phantoms(size.train, 1000), test = phantoms(size.test, 2000);
  const Problem problem = problem_of(size);
  int64_t parameters = 0;
  double zero_filled = 0;
  {
    Restorer model(network_of(size, arms[0]));
    model.to(device);
    parameters = model.parameter_count();
    for (const auto& scan : test) {
      const Restored frame = restore_frame(model, *scan, problem, 0, device);
      zero_filled += psnr(frame.truth, frame.zero_filled) / static_cast<double>(test.size());
    }
  }
  std::vector<Outcomes> results(arm_count);
  for (int64_t seed = 1; seed <= study_seeds; ++seed)
    for (size_t a = 0; a < arm_count; ++a) {
      double loss = 0;
      const Outcome o =
          train_and_evaluate(arms[a], static_cast<uint64_t>(seed), size, train, test, device, loss);
      results[a].push_back(o);
      const double minutes =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 60;
      std::printf("seed %ld, %-22s loss %.4f; PSNR %.2f dB, at the worst shift %.2f dB; %.1f min\n",
                  long(seed), arms[a].name, loss, o.psnr[0], *std::min_element(o.psnr.begin(), o.psnr.end()),
                  minutes);
      std::fflush(stdout);
      for (size_t i = 0; i < o.psnr.size(); ++i)
        log.write({{"seed", double(seed)},
                   {"arm", double(a)},
                   {"shift", double(shifts_of(size)[i])},
                   {"psnr", o.psnr[i]}});
    }
  print_table(results, size, zero_filled, parameters);
  draw(results, size, png);
}
