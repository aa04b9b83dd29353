// Trains a small transformer on grids to restore undersampled volumes of MRI, and says how well it does.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>

#include "flags.h"
#include "picture.h"
#include "restoration.h"
#include "training.h"
#include "volume_flags.h"
#include "wrap_study.h"

using namespace torus;

namespace {

// --------------------------------------------------------------------------------------------------- flags

struct Options {
  std::string undersample, sampling = "random", wrap, patch, window, dtype = "f32";
  double acceleration = 4, center_fraction = 0.08, lr = 0.003;
  int64_t slices = 0, layers = 3, heads = 4, width = 64, cascades = 1, batch = 1, steps = 400, seed = 1;
  // What a resumed run is free to change:
  std::vector<std::string> files, test;
  VolumeFlags reading;
  std::string save, resume, log, png, study;
  Device device = cpu;
  int64_t eval_every = 100, threads = 0;
  double minutes = 0;
  bool phantom = false;
};

std::vector<Flag> add_flags(CLI::App& app, Options& o) {
  std::vector<Flag> flags = {
      {"undersample", "axes to undersample, of z,y,x: x (default), of ISMRMRD y", &o.undersample},
      {"sampling", "which frequencies are measured: random (default) or equispaced, as fastMRI does",
       &o.sampling},
      {"acceleration", "one of so many frequencies is measured on each such axis (4)", &o.acceleration},
      {"center-fraction", "share of the frequencies that are measured in the middle (0.08)",
       &o.center_fraction},
      {"wrap",
       "axes on which windows wrap around, of z,y,x, or none; default: of k-space those that are encoded, of "
       "images "
       "those that are undersampled",
       &o.wrap},
      {"slices", "slices of a slab, which is restored as a whole: 8, or 1 of multislice scans", &o.slices},
      {"patch", "voxels of a token along z,y,x: 2,4,4, or 1,4,4 where slabs have an odd number of slices",
       &o.patch},
      {"window", "tokens that a token sees along z,y,x: 3,5,5, or 1,7,7 of single slices", &o.window},
      {"layers", "transformer blocks (3)", &o.layers},
      {"heads", "attention heads of a block (4)", &o.heads},
      {"width", "channels (64)", &o.width},
      {"cascades", "networks in line, each followed by data consistency (1)", &o.cascades},
      {"batch", "slabs in a step (1)", &o.batch},
      {"steps", "steps of the whole schedule (400)", &o.steps},
      {"lr", "highest learning rate; it warms up, then falls to 0 along a cosine (0.003)", &o.lr},
      {"seed", "of weights, slabs and masks (1)", &o.seed},
      {"dtype", "of the network: f32 (default), or bf16 with weights kept in f32", &o.dtype},
  };
  for (const Flag& flag : o.reading.flags()) flags.push_back(flag);
  for (Flag& flag : flags) flag.add_to(app);
  o.reading.add_switches(app);
  const auto limit = [&](const std::string& name, const CLI::Validator& rule) {
    app.get_option("--" + name)->check(rule);
  };
  limit("sampling", CLI::IsMember({"random", "equispaced"}));
  limit("dtype", CLI::IsMember({"f32", "bf16"}));
  for (const char* name : {"slices", "layers", "heads", "width", "cascades", "batch", "steps", "lr"})
    limit(name, above_0);
  limit("seed", at_least_0);
  limit("acceleration", number_rule("a number of at least 1", [](double x) { return x >= 1; }));
  limit("center-fraction", from_0_to_1);

  app.add_option("FILES", o.files,
                 "volumes: fastMRI, ISMRMRD, MINC2, or plain HDF5; the last is kept to test on");
  app.add_option("--test", o.test, "volumes to test on instead of the last of FILES");
  app.add_flag("--phantom", o.phantom, "train on phantoms even where there are volumes");
  app.add_option("--png", o.png, "picture of a slice to test on (train_mri.png; of a study wrap_study.png)");
  app.add_option("--study", o.study, "wrap: an experiment instead of a training; see below; takes --steps")
      ->check(CLI::IsMember({"wrap"}));
  add_device(app, o.device);
  app.add_option("--minutes", o.minutes, "stop after so long, at whatever step")->check(at_least_0);
  app.add_option("--save", o.save, "checkpoint to write, at each evaluation and at the end");
  app.add_option("--resume", o.resume, "checkpoint to go on from, with its flags");
  app.add_option("--eval-every", o.eval_every, "steps between evaluations of one slab (100)")->check(above_0);
  app.add_option("--log", o.log, "file for one JSON object a step and evaluation");
  app.add_option("--threads", o.threads, "threads to use (default: one a processor)")->check(above_0);
  app.footer(
      "Without FILES, volumes that examples/mri_volumes.sh has made of Debian's packages are used, or else "
      "phantoms.\n\n" +
      wrap_study_text());
  return flags;
}

constexpr const char* axis_names[] = {"z", "y", "x"};

// "y,x" of --FLAG.
std::array<bool, 3> axes_named(const std::string& flag, const std::string& text) {
  std::array<bool, 3> result{};
  if (text == "none") return result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto found = std::find(std::begin(axis_names), std::end(axis_names), part);
    check(found != std::end(axis_names), Error::Kind::Value, "--", flag, ": expected axes of z,y,x, got ",
          text);
    result[static_cast<size_t>(found - std::begin(axis_names))] = true;
  }
  return result;
}

std::string text_of(const std::array<bool, 3>& axes) {
  std::string result;
  for (size_t k = 0; k < 3; ++k)
    if (axes[k]) result += (result.empty() ? "" : ",") + std::string(axis_names[k]);
  return result.empty() ? "none" : result;
}

std::array<int64_t, 3> three_numbers(const std::string& flag, const std::string& text) {
  std::array<int64_t, 3> result{};
  std::istringstream parts(text);
  char comma = ',';
  for (size_t k = 0; k < 3; ++k)
    check((k == 0 || parts >> comma) && comma == ',' && parts >> result[k] && result[k] > 0,
          Error::Kind::Value, "--", flag, ": expected three numbers above 0, as 2,4,4, got ", text);
  check(parts.peek() == EOF, Error::Kind::Value, "--", flag, ": expected three numbers, got ", text);
  return result;
}

// ---------------------------------------------------------------------------------------------------- data

using Scans = std::vector<std::shared_ptr<const Scan>>;

struct Data {
  Scans train, test;
};

// What flags leave open depends on the first file.
void take_defaults(Options& o) {
  bool is_multislice = false, is_ismrmrd = false;
  if (!o.files.empty()) {
    const Volume volume = open_volume(o.files[0], o.reading.options());
    const VolumeInfo& info = volume.info();
    const bool is_kspace = o.reading.dataset.empty();
    is_ismrmrd = is_kspace && info.layout == VolumeLayout::ismrmrd;
    is_multislice =
        is_kspace && (info.layout == VolumeLayout::fastmri || (is_ismrmrd && info.shape[-3] == 1));  // kz
    is_multislice |= info.shape.dim() < 3;
  }
  if (o.undersample.empty()) o.undersample = is_ismrmrd ? "y" : "x";
  if (o.slices == 0) o.slices = is_multislice ? 1 : 8;
  if (o.patch.empty()) o.patch = o.slices % 2 == 0 ? "2,4,4" : "1,4,4";
  if (o.window.empty()) o.window = o.slices == 1 ? "1,7,7" : "3,5,5";
}

// Without files, those that examples/mri_volumes.sh makes.
void find_files(Options& o) {
  const std::filesystem::path made = TORUS_VOLUMES_DIR;
  const std::string train = (made / "ch2.mnc").string(), test = (made / "inia19.mnc").string();
  if (!o.files.empty()) return;
  check(o.test.empty(), Error::Kind::Value, "--test: expected FILES to train on, too");
  if (!o.phantom && std::filesystem::exists(train) && std::filesystem::exists(test)) {
    std::printf("no files given: using the volumes in %s\n", made.c_str());
    o.files = {train};
    o.test = {test};
  } else if (!o.phantom) {
    std::printf(
        "no files given: training on phantoms (bash examples/mri_volumes.sh makes volumes of Debian's "
        "packages)\n");
  }
}

Data open_data(const Options& o, const std::array<int64_t, 3>& patch) {
  Data data;
  if (o.files.empty()) {
    const Shape shape{std::max<int64_t>(o.slices, 16), 24 * patch[1], 24 * patch[2]};
    for (uint64_t i = 0; i < 18; ++i)
      (i < 16 ? data.train : data.test).push_back(std::make_shared<PhantomScan>(shape, 1000 + i));
    return data;
  }
  const auto open = [&](const std::vector<std::string>& files, Scans& into) {
    for (const std::string& file : files)
      into.push_back(std::make_shared<FileScan>(file, o.reading.options(), patch));
  };
  open(o.files, data.train);
  open(o.test, data.test);
  if (o.test.empty() && data.train.size() > 1) {
    data.test = {data.train.back()};
    data.train.pop_back();
  } else if (o.test.empty()) {
    data.test = data.train;
    std::printf("note: one file only; it is trained and tested on, and says nothing about others\n");
  }
  return data;
}

Problem problem_of(const Options& o) {
  const Problem problem{
      axes_named("undersample", o.undersample),
      {o.sampling == "random" ? Sampling::random : Sampling::equispaced, o.acceleration, o.center_fraction},
      o.slices,
      three_numbers("patch", o.patch)};
  check(!problem.axes().empty(), Error::Kind::Value, "--undersample: expected at least one axis of z,y,x");
  check(o.slices % problem.patch[0] == 0, Error::Kind::Value, "--slices: expected a multiple of the patch's ",
        problem.patch[0], ", got ", o.slices);
  return problem;
}

void check_fits(const Problem& problem, const Scan& scan) {
  check(scan.grid[0] >= problem.slices, Error::Kind::Value, "--slices: expected at most the ", scan.grid[0],
        " of ", scan.name, ", got ", problem.slices);
  check(!problem.sampled[0] || scan.grid[0] == problem.slices, Error::Kind::Value,
        "--undersample z: slabs hold the whole axis, so --slices must be ", scan.grid[0], " for ", scan.name);
  problem.mask(scan, {0});  // throws where there is none
}

std::string words(const std::array<int64_t, 3>& n) {
  return format("%ld x %ld x %ld", long(n[0]), long(n[1]), long(n[2]));
}

void print_scans(const char* title, const Scans& scans) {
  constexpr size_t most = 4;
  for (size_t i = 0; i < std::min(most, scans.size()); ++i) {
    const Scan& scan = *scans[i];
    std::printf("%-9s %s: %s (%s, %s, %s)", title, printable(scan.name).c_str(), words(scan.shown).c_str(),
                scan.axes[0].c_str(), scan.axes[1].c_str(), scan.axes[2].c_str());
    if (scan.frames > 1) std::printf(", %ld frames", long(scan.frames));
    if (scan.coils > 1)
      std::printf(", %ld coils, restored one by one and joined by the root of the sum of squares",
                  long(scan.coils));
    if (scan.grid != scan.shown) std::printf(", restored as %s", words(scan.grid).c_str());
    std::printf("\n");
  }
  if (scans.size() > most) std::printf("%-9s and %ld more\n", title, long(scans.size() - most));
}

// Which windows wrap, and why; said for each axis.
std::array<bool, 3> choose_wrap(Options& o, const Problem& problem, const Data& data,
                                const std::array<int64_t, 3>& window) {
  const bool is_given = !o.wrap.empty();
  std::array<bool, 3> wraps{};
  const Scan& scan = *data.train[0];
  if (is_given) {
    wraps = axes_named("wrap", o.wrap);
    check(!wraps[0] || scan.grid[0] == o.slices, Error::Kind::Value, "--wrap z: slabs of ", o.slices,
          " slices are a part of the ", scan.grid[0], " of ", scan.name, ", and have no other end to see");
  } else {
    for (const Scans* scans : {&data.train, &data.test})
      for (const auto& other : *scans)
        check(other->encoded == scan.encoded, Error::Kind::Value, "--wrap: say which axes wrap, because ",
              scan.name, " and ", other->name, " are not both k-space of the same axes");
    for (size_t k = 0; k < 3; ++k) {
      // Where a slab is a part of the axis it has no other end to see.
      const bool whole = k != 0 || scan.grid[0] == o.slices;
      wraps[k] = whole && (scan.encoded[k] || problem.sampled[k]);
    }
  }
  for (size_t k = 0; k < 3; ++k) {
    const char* why = is_given                                ? "as --wrap says"
                      : wraps[k] && scan.encoded[k]           ? "it is encoded"
                      : wraps[k]                              ? "its sampling is simulated"
                      : scan.encoded[k] || problem.sampled[k] ? "a slab is a part of it"
                      : scan.axes[k] == "slice" && k == 0     ? "slices of a multislice scan"
                                                              : "nothing is sampled on it";
    const std::string own = scan.axes[k] == axis_names[k] ? "" : " (" + scan.axes[k] + ")";
    std::printf("window    %s%s: %ld token%s, %s: %s\n", axis_names[k], own.c_str(), long(window[k]),
                window[k] == 1 ? "" : "s", wraps[k] ? "wraps around" : "shifts inward at the ends", why);
  }
  o.wrap = text_of(wraps);
  return wraps;
}

// ------------------------------------------------------------------------------------------------ training

// Metrics of nothing mean nothing.
bool is_zero(const Tensor& image) {
  const auto values = image.to_vector<float>();
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0; });
}

// From step `step` and batch `position` to the end, or to where time or Ctrl-C stops it. False after Ctrl-C.
bool train(Restorer& model, AdamW& optimizer, const Data& data, const Problem& problem,
           const Options& options, const Settings& settings, Device device, int64_t step, int64_t position) {
  JsonLog log(options.log, step > 0);
  const SlabSource source(data.train, problem, options.batch, static_cast<uint64_t>(options.seed));
  Prefetcher batches(
      [&](int64_t index) {
        Slabs slabs = source(index);
        return Batch{slabs.frequencies, slabs.masks};
      },
      position);
  const auto save = [&] {
    Checkpoint checkpoint = make_checkpoint(model, optimizer);
    checkpoint.settings = settings;
    checkpoint.step = step;
    checkpoint.loader_position = batches.position();
    save_checkpoint(options.save, checkpoint);
  };
  const auto& grid = data.train[0]->grid;
  const Interrupt interrupt;
  Progress progress(step, options.steps,
                    options.batch * options.slices * grid[1] * grid[2] /
                        (problem.patch[0] * problem.patch[1] * problem.patch[2]));
  SlabTrainer trainer(model, optimizer, device);
  bool stopped = false;
  const int64_t begun = step;
  if (step == options.steps && !options.save.empty()) save();  // what was resumed is done
  while (step < options.steps && !stopped) {
    const double lr =
        warmup_cosine(step, std::min<int64_t>(50, options.steps / 10), options.steps, options.lr);
    const Batch batch = batches.next();
    trainer.step({batch.inputs, batch.targets}, lr);
    ++step;
    stopped = interrupt.requested() || (options.minutes > 0 && progress.seconds() > 60 * options.minutes);
    const bool pause = stopped || step % options.eval_every == 0 || step == options.steps;
    if (!trainer.full() && !pause) continue;
    const std::vector<double> losses = trainer.losses();
    progress.steps(losses);
    for (size_t i = 0; i < losses.size(); ++i)
      log.write({{"step", double(step - int64_t(losses.size() - 1 - i))}, {"loss", losses[i]}});
    if (!pause) continue;
    if (!stopped && step < options.steps) {
      const Scan& scan = *data.test[0];
      const Restored slab = restore_frame(model, scan, problem, 0, device, 0,
                                          {(scan.grid[0] - problem.slices) / 2, problem.slices});
      const double before = psnr(slab.truth, slab.zero_filled), after = psnr(slab.truth, slab.restored);
      if (is_zero(slab.truth)) {
        progress.note(format("step %ld: the slab to test on is all zero", long(step)));
      } else {
        log.write({{"step", double(step)}, {"psnr", after}});
        progress.note(format("step %ld: a slab to test on has %.2f dB, zero-filled %.2f dB", long(step),
                             after, before));
      }
    }
    if (!options.save.empty()) save();
  }
  const std::string where =
      "step " + std::to_string(step) + (options.save.empty() ? "" : ", saved to " + options.save);
  progress.note((interrupt.requested() ? "interrupted at "
                 : stopped             ? "time is up at "
                                       : "trained to ") +
                where);
  if (step > begun)
    progress.note(
        format("waited for data: %.1f %% of the time", 100 * batches.waited() / progress.seconds()));
  return !interrupt.requested();
}

// ------------------------------------------------------------------------------------------- what came of it

struct Score {
  double nmse, psnr, ssim;
};

Score score(const Tensor& truth, const Tensor& image) {
  return {nmse(truth, image), psnr(truth, image),
          truth.size(1) < 7 || truth.size(2) < 7 ? NAN : ssim(truth, image)};
}

void print_row(const std::string& what, const char* image, const Score& s) {
  std::printf("%-34s %-12s %8.4f %8.2f %8.4f\n", what.c_str(), image, s.nmse, s.psnr, s.ssim);
}

// Truth, zero-filled and restored; below, what was measured, and the errors five times as bright, all on one
// scale.
void draw(const Restored& frame, const Scan& scan, const Problem& problem, const std::string& path) {
  const Tensor truth = shown_part(frame.truth, scan), filled = shown_part(frame.zero_filled, scan),
               restored = shown_part(frame.restored, scan);
  const int64_t z = truth.size(0) / 2, height = truth.size(1), width = truth.size(2);
  const auto slice = [&](const Tensor& volume) {
    std::vector<double> values = volume.select(0, z).to_vector<double>();
    const auto row = [&](int64_t y) { return values.begin() + y * width; };
    for (int64_t y = 0; scan.flipped[1] && y < height / 2; ++y)
      std::swap_ranges(row(y), row(y + 1), row(height - 1 - y));
    for (int64_t y = 0; scan.flipped[2] && y < height; ++y) std::reverse(row(y), row(y + 1));
    return values;
  };
  const std::vector<double> images[] = {slice(truth), slice(filled), slice(restored)};
  std::vector<double> sorted = images[0];
  const auto top = sorted.begin() + static_cast<int64_t>(0.999 * static_cast<double>(sorted.size() - 1));
  std::nth_element(sorted.begin(), top, sorted.end());
  const double white = *top > 0 ? *top : 1;
  const int64_t zoom = std::max<int64_t>(1, 256 / std::max(height, width));
  constexpr int64_t gap = 8, label = 18;
  const int64_t panel_width = std::max<int64_t>(width * zoom, 150), panel_height = height * zoom;
  Picture picture(3 * panel_width + 4 * gap, 2 * (panel_height + label) + 3 * gap, {0, 0, 0});
  const auto panel = [&](int64_t row, int64_t column, const std::string& title,
                         const std::vector<double>& values, int64_t columns, int64_t by) {
    const int64_t left = gap + column * (panel_width + gap), y = gap + row * (panel_height + label + gap);
    picture.text(left, y, title, {255, 255, 255});
    std::vector<unsigned char> grey;
    for (const double value : values)
      grey.push_back(static_cast<unsigned char>(std::lround(255 * std::clamp(value, 0., 1.))));
    picture.image(left, y + label, grey, columns, by);
  };
  const auto decibels = [&](const Tensor& image) {
    return is_zero(truth) ? std::string() : format("%.2f dB", psnr(truth, image));
  };
  const std::string titles[] = {"truth", "zero-filled " + decibels(filled), "restored " + decibels(restored)};
  for (size_t i = 0; i < 3; ++i) {
    std::vector<double> shown = images[i], error = images[i];
    for (size_t at = 0; at < shown.size(); ++at) {
      shown[at] = images[i][at] / white;
      error[at] = 5 * std::abs(images[i][at] - images[0][at]) / white;
    }
    panel(0, static_cast<int64_t>(i), titles[i], shown, width, zoom);
    if (i > 0) panel(1, static_cast<int64_t>(i), "error x 5", error, width, zoom);
  }
  // The mask of this slice over the picture's extent: its frequencies may be more than the picture's pixels.
  const auto mask = frame.mask.expand({frame.mask.size(0), scan.grid[1], scan.grid[2], 1})
                        .select(0, frame.mask.size(0) / 2)
                        .to_vector<double>();
  panel(1, 0, "measured: white", resized(mask, scan.grid[1], scan.grid[2], height * zoom, width * zoom),
        width * zoom, 1);
  picture.write(path);
  std::printf(
      "wrote %s: slice %ld of %s, %s: truth, zero-filled, restored; what is measured of %s; errors times 5; "
      "white is %.4g\n",
      printable(path).c_str(), long(z), printable(scan.name).c_str(),
      scan.is_world ? radiological : "rows and columns as stored", text_of(problem.sampled).c_str(), white);
}

void report(const Restorer& model, const Data& data, const Problem& problem, Device device,
            const std::string& png) {
  std::printf("%-34s %-12s %8s %8s %8s\n", "volume to test on", "image", "NMSE", "PSNR dB", "SSIM");
  std::vector<Score> all[2];
  for (const auto& scan : data.test)
    for (int64_t f = 0; f < scan->frames; ++f) {
      const Restored frame = restore_frame(model, *scan, problem, f, device);
      const Tensor truth = shown_part(frame.truth, *scan);
      const std::string name = scan->name.substr(scan->name.rfind('/') + 1) +
                               (scan->frames > 1 ? " " + std::to_string(f) : std::string());
      if (is_zero(truth)) {
        std::printf("%-34s is all zero: there is nothing to measure\n", printable(name).c_str());
      } else {
        all[0].push_back(score(truth, shown_part(frame.zero_filled, *scan)));
        all[1].push_back(score(truth, shown_part(frame.restored, *scan)));
        print_row(printable(name), "zero-filled", all[0].back());
        print_row("", "restored", all[1].back());
      }
      if (f == 0 && scan == data.test[0]) draw(frame, *scan, problem, png);
    }
  if (all[0].size() < 2) return;
  for (size_t i = 0; i < 2; ++i) {
    const auto mean = [&](double Score::*member) {
      double sum = 0;
      for (const Score& s : all[i]) sum += s.*member;
      return sum / static_cast<double>(all[i].size());
    };
    print_row(i == 0 ? "mean of " + std::to_string(all[0].size()) : "", i == 0 ? "zero-filled" : "restored",
              {mean(&Score::nmse), mean(&Score::psnr), mean(&Score::ssim)});
  }
}

std::string joined(const std::vector<std::string>& paths) {
  std::string result;
  for (const std::string& path : paths) result += std::filesystem::absolute(path).string() + "\n";
  return result;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) result.push_back(line);
  return result;
}

const Flag& flag_named(const std::vector<Flag>& flags, const std::string& name) {
  return *std::find_if(flags.begin(), flags.end(), [&](const Flag& flag) { return flag.name == name; });
}

// What a study does not look at.
void check_study(const CLI::App& app) {
  constexpr const char* taken[] = {"--study", "--steps", "--device", "--threads", "--png", "--log"};
  for (const CLI::Option* option : app.get_options())
    check(option->count() == 0 || std::count(std::begin(taken), std::end(taken), option->get_name()) > 0,
          Error::Kind::Value, "--study wrap does not take ", option->get_name(),
          ": of all flags only --steps, --device, --threads, --png and --log");
}

int run(const CLI::App& app, Options& options, std::vector<Flag>& flags) {
  const Device device = options.device;
  if (options.threads > 0) set_num_threads(static_cast<int>(options.threads));
  if (options.png.empty()) options.png = options.study.empty() ? "train_mri.png" : "wrap_study.png";
  check_can_save(options.png);
  check(options.files.empty() || !options.phantom, Error::Kind::Value,
        "--phantom: expected no FILES to train on, got ", options.files.empty() ? "" : options.files[0]);
  if (options.study == "wrap") {
    check_study(app);
    std::printf("%s\n\n", wrap_study_text().c_str());
    StudySize size = device == cpu ? small_study : large_study;
    if (flag_named(flags, "steps").given()) size.steps = options.steps;
    std::printf("%ld steps each\n", long(size.steps));
    run_wrap_study(size, device, options.png, options.log);
    return 0;
  }
  std::optional<Checkpoint> saved;
  if (!options.resume.empty()) {
    saved = load_checkpoint(options.resume);
    take_settings(flags, saved->settings, options.resume, "train_mri");
    if (options.files.empty()) {
      options.files = lines_of(saved->settings["files"]);
      options.test = lines_of(saved->settings["test"]);
      check(!options.phantom || options.files.empty(), Error::Kind::Value, "--phantom is at odds with ",
            options.resume, ", which was trained on files");
      options.phantom = options.files.empty();
    }
    options.reading.raw |= saved->settings["raw"] == "yes";
  }
  if (!options.save.empty()) check_can_save(options.save);
  manual_seed(static_cast<uint64_t>(options.seed));

  find_files(options);
  for (const char* name : {"--dataset", "--group", "--leave-out", "--encoding", "--raw", "--trust"})
    check(!options.files.empty() || app.get_option(name)->count() == 0, Error::Kind::Value, name,
          ": expected FILES to read");
  take_defaults(options);
  const Problem problem = problem_of(options);
  const auto window = three_numbers("window", options.window);
  if (!options.wrap.empty()) axes_named("wrap", options.wrap);
  const Data data = open_data(options, problem.patch);
  for (const Scans* scans : {&data.train, &data.test})
    for (const auto& scan : *scans) check_fits(problem, *scan);
  print_scans("train on", data.train);
  print_scans("test on", data.test);
  const auto& grid = data.train[0]->grid;
  std::printf(
      "slabs     %s, tokens of %s voxels; undersampled along %s: %s, one frequency of %g, %g %% in the "
      "middle\n",
      words({options.slices, grid[1], grid[2]}).c_str(), words(problem.patch).c_str(),
      text_of(problem.sampled).c_str(), options.sampling.c_str(), options.acceleration,
      100 * options.center_fraction);
  const auto wraps = choose_wrap(options, problem, data, window);

  Settings settings = {{"files", joined(options.files)},
                       {"test", joined(options.test)},
                       {"raw", options.reading.raw ? "yes" : ""}};
  for (const auto& [name, value] : settings)
    check(!saved || saved->settings[name] == value, Error::Kind::Value, name == "raw" ? "--" : "the ", name,
          " is not as when ", options.resume, " was trained");
  for (const Flag& flag : flags) settings[flag.name] = flag.text();

  Restorer model({.cascades = options.cascades,
                  .network = network_options(problem,
                                             {.channels = options.width,
                                              .heads = options.heads,
                                              .window = {window.begin(), window.end()},
                                              .boundary = boundaries(wraps),
                                              .dtype = options.dtype == "bf16" ? bf16 : f32},
                                             options.layers),
                  .axes = problem.axes()});
  model.to(device);
  AdamW optimizer(model.named_parameters(), {.beta2 = 0.99, .weight_decay = 0.01});
  std::printf("model     %ld x %ld layers, %ld heads, width %ld, %.2f M parameters\n", long(options.cascades),
              long(options.layers), long(options.heads), long(options.width),
              double(model.parameter_count()) / 1e6);
  if (saved) restore(*saved, model, optimizer);
  const bool ended = train(model, optimizer, data, problem, options, settings, device,
                           saved ? saved->step : 0, saved ? saved->loader_position : 0);
  if (!ended) return 128 + SIGINT;
  report(model, data, problem, device, options.png);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Trains a small transformer on grids to restore undersampled volumes of MRI: a demonstration.");
  Options options;
  std::vector<Flag> flags = add_flags(app, options);
  return run_program(app, argc, argv, "train_mri", [&] { return run(app, options, flags); });
}
