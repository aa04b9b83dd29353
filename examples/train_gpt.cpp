// Trains a small GPT on text, or on the addition of numbers: evaluates, samples, saves, resumes.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "flags.h"
#include "tasks.h"
#include "torus/torus.h"
#include "training.h"

using namespace torus;

namespace {

// --------------------------------------------------------------------------------------------------- flags

struct Options {
  std::string preset, task = "text", vocabulary = "characters", gelu = "exact", dtype = "f32",
                      optimizer = "adamw";
  int64_t layers = 0, heads = 0, width = 0, context = 0, batch = 0, steps = 0, seed = 1;
  double lr = 0, dropout = 0;
  // What a resumed run is free to change:
  std::string text, tokens, save, resume, log, profile;
  Device device = cpu;
  int64_t eval_every = 500, sample = 300, threads = 0, top_k = 0;
  double minutes = 0, temperature = 0.8, top_p = 1;
  bool anomaly = false;
};

// Sizes, and steps that take two cores two minutes (nano and addition), six (toy) and nine hours (char). That
// of GPT-2 is for a CUDA device.
const std::map<std::string, Settings> presets = {
    {"nano",
     {{"layers", "4"},
      {"heads", "4"},
      {"width", "128"},
      {"context", "64"},
      {"batch", "12"},
      {"steps", "3000"},
      {"lr", "0.003"}}},
    {"toy",
     {{"layers", "4"},
      {"heads", "4"},
      {"width", "128"},
      {"context", "128"},
      {"batch", "32"},
      {"steps", "2000"},
      {"lr", "0.003"},
      {"gelu", "tanh"}}},
    {"char",
     {{"layers", "6"},
      {"heads", "6"},
      {"width", "384"},
      {"context", "256"},
      {"batch", "64"},
      {"steps", "5000"},
      {"lr", "0.001"},
      {"dropout", "0.2"},
      {"gelu", "tanh"}}},
    {"gpt2",
     {{"layers", "12"},
      {"heads", "12"},
      {"width", "768"},
      {"context", "1024"},
      {"batch", "32"},
      {"steps", "20000"},
      {"lr", "0.0006"},
      {"dtype", "bf16"},
      {"gelu", "tanh"}}},
    {"addition",
     {{"layers", "2"},
      {"heads", "4"},
      {"width", "128"},
      {"context", "11"},
      {"batch", "128"},
      {"steps", "4000"},
      {"lr", "0.001"}}},
};

// Presets give the learning rate of AdamW; others take so many times that.
const std::map<std::string, double> rate_factors = {{"adamw", 1}, {"lion", 0.1}, {"muon", 7}, {"sgd", 30}};

std::vector<Flag> add_flags(CLI::App& app, Options& o) {
  std::vector<Flag> flags = {
      {"preset", "sizes and schedule: nano (default), toy, char, gpt2, addition (default for that task)",
       &o.preset},
      {"task", "text (default), or addition: sums of two numbers of three digits", &o.task},
      {"vocabulary", "tokens of the text: characters (default) or bytes", &o.vocabulary},
      {"layers", "transformer blocks", &o.layers},
      {"heads", "attention heads of a block", &o.heads},
      {"width", "channels", &o.width},
      {"context", "tokens seen at once", &o.context},
      {"batch", "sequences in a step", &o.batch},
      {"steps", "steps of the whole schedule", &o.steps},
      {"optimizer", "adamw (default), lion, muon, or sgd with momentum", &o.optimizer},
      {"lr", "highest learning rate; it warms up, then falls to 0 along a cosine", &o.lr},
      {"dropout", "probability of dropping", &o.dropout},
      {"gelu", "form of the activation: exact (default), or tanh, as in GPT-2", &o.gelu},
      {"seed", "of weights, batches and dropout", &o.seed},
      {"dtype", "f32 (default), f64, or bf16 or f16 with weights kept in f32", &o.dtype, true},
  };
  for (Flag& flag : flags) flag.add_to(app);
  const auto limit = [&](const std::string& name, const CLI::Validator& rule) {
    app.get_option("--" + name)->check(rule);
  };
  limit("preset", CLI::IsMember({"nano", "toy", "char", "gpt2", "addition"}));
  limit("task", CLI::IsMember({"text", "addition"}));
  limit("vocabulary", CLI::IsMember({"characters", "bytes"}));
  limit("gelu", CLI::IsMember({"exact", "tanh"}));
  limit("dtype", CLI::IsMember({"f32", "f64", "bf16", "f16"}));
  limit("optimizer", CLI::IsMember({"adamw", "lion", "muon", "sgd"}));
  for (const char* name : {"layers", "heads", "width", "context", "batch", "steps", "lr"})
    limit(name, above_0);
  limit("seed", at_least_0);
  limit("dropout", from_0_to_1);

  app.add_option("--text", o.text, "file to train on (default: the sources of Torus)");
  app.add_option("--tokens", o.tokens,
                 "file of 16-bit tokens to train on instead of a text, as llm.c writes them");
  add_device(app, o.device);
  app.add_option("--minutes", o.minutes, "stop after so long, at whatever step")->check(at_least_0);
  app.add_option("--save", o.save, "checkpoint to write, at each evaluation and at the end");
  app.add_option("--resume", o.resume, "checkpoint to go on from, with its flags; --dtype may be another");
  app.add_option("--eval-every", o.eval_every, "steps between evaluations (500)")->check(above_0);
  app.add_option("--sample", o.sample, "tokens of the sample at the end (300)")->check(at_least_0);
  app.add_option("--temperature", o.temperature, "of the sample (0.8); 0 takes the likeliest token")
      ->check(at_least_0);
  app.add_option("--top-k", o.top_k, "draw the sample from so many likeliest tokens (0: all)")
      ->check(at_least_0);
  app.add_option("--top-p", o.top_p, "and from the likeliest that have this probability together (1)")
      ->check(number_rule("a number above 0, up to 1", [](double p) { return p > 0 && p <= 1; }));
  app.add_flag("--anomaly", o.anomaly, "stop at the first op that makes a NaN or an infinity, and name it");
  app.add_option("--log", o.log, "file for one JSON object a step and evaluation");
  app.add_option("--profile", o.profile,
                 "file for a trace of up to 20 steps, which Perfetto opens; prints where their time goes");
  app.add_option("--threads", o.threads, "threads to use (default: one a processor)")->check(above_0);
  return flags;
}

// Flags given neither on the command line nor by a checkpoint are the preset's.
void take_preset(std::vector<Flag>& flags, Options& options) {
  if (options.preset.empty()) options.preset = options.task == "text" ? "nano" : options.task;
  const Settings& preset = presets.at(options.preset);
  for (Flag& flag : flags)
    if (const auto found = preset.find(flag.name); found != preset.end() && !flag.given()) {
      flag.set(found->second);
      if (flag.name == "lr") options.lr *= rate_factors.at(options.optimizer);
    }
}

// ------------------------------------------------------------------------------------------------ training

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, const GPT& model) {
  const std::vector<NamedParameter> parameters = model.named_parameters();
  if (name == "lion") return std::make_unique<Lion>(parameters);
  if (name == "muon") return std::make_unique<Muon>(parameters, MuonOptions{.weight_decay = 0.1});
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions{.momentum = 0.9, .nesterov = true});
  return std::make_unique<AdamW>(parameters, AdamWOptions{.beta2 = 0.99, .weight_decay = 0.1});
}

double evaluate(GPT& model, const Task& task, bool quick) {
  model.train(false);
  const double result = task.score(model, quick);
  model.train();
  return result;
}

// Of a model's matrix products in one step, forward and backward: 6 for each parameter and token, and 6 T C
// for each layer's causal attention.
double flops_per_token(const GPT& model) {
  const GPTConfig& config = model.config();
  return 6 * (static_cast<double>(model.parameter_count()) +
              static_cast<double>(config.layers * config.context * config.width));
}

// From step `step` and batch `position` to the end, or to where time or Ctrl-C stops it. False after Ctrl-C.
bool train(GPT& model, Optimizer& optimizer, LossScale* scale, const Task& task, const Options& options,
           const Settings& settings, int64_t step, int64_t position) {
  const Device device = options.device;
  JsonLog log(options.log, step > 0);
  Prefetcher batches([&](int64_t index) { return task.batch(index); }, position);
  const auto save = [&] {
    Checkpoint checkpoint = make_checkpoint(model, optimizer);
    checkpoint.vocabulary = task.code_points();
    checkpoint.settings = settings;
    if (scale) {
      const auto state = scale->state().to_vector<double>();
      checkpoint.settings["loss_scale"] = to_text(state[0]) + " " + to_text(state[1]);
    }
    checkpoint.step = step;
    checkpoint.loader_position = batches.position();
    save_checkpoint(options.save, checkpoint);
  };

  const Interrupt interrupt;
  Progress progress(step, options.steps, options.batch * options.context);
  Tensor inputs = Tensor::zeros({options.batch, options.context}, i64, device), targets = inputs.clone();
  Trainer trainer(
      model, optimizer, device, [&] { return model.loss(inputs, targets); }, scale);
  std::vector<double> rates;  // of the steps whose losses are not known yet
  bool stopped = false;
  std::optional<AnomalyMode> anomaly;
  if (options.anomaly) anomaly.emplace();
  std::optional<Profiler> profiler;
  // When all is warm, or half of the steps that a short run has.
  const int64_t profile_from = step + std::min<int64_t>(5, (options.steps - step) / 2),
                profile_to = profile_from + 20;
  const auto report = [&] {
    const std::vector<double> losses = trainer.losses();
    if (losses.empty()) return;
    progress.steps(losses);
    for (size_t i = 0; i < losses.size(); ++i)
      log.write({{"step", double(step - int64_t(losses.size() - 1 - i))},
                 {"loss", losses[i]},
                 {"lr", rates[i]},
                 {"tokens_per_second", progress.tokens_per_second()}});
    rates.clear();
  };
  const auto write_profile = [&] {
    profiler->stop();
    report();  // what follows is no training
    profiler->write_trace(options.profile);
    const ProfileSummary summary = profiler->summary();
    profiler.reset();
    const auto steps = static_cast<double>(step - profile_from);
    std::ostringstream table;
    table << summary;
    progress.note(table.str());
    if (summary.device_kernels > 0)
      progress.note(format("a step: %.1f kernels, %.3f ms of the device's time",
                           double(summary.device_kernels) / steps, summary.device_seconds * 1e3 / steps));
  };
  const bool profiles = !options.profile.empty();
  if (step == options.steps && !options.save.empty()) save();  // what was resumed is done
  while (step < options.steps && !stopped) {
    if (profiles && step == profile_from) profiler.emplace();
    if (profiler && step == profile_to) write_profile();
    const double lr =
        warmup_cosine(step, std::min<int64_t>(100, options.steps / 10), options.steps, options.lr);
    const Batch batch = batches.next();
    inputs.copy_(batch.inputs);
    targets.copy_(batch.targets);
    trainer.step(lr);
    rates.push_back(lr);
    ++step;
    stopped = interrupt.requested() || (options.minutes > 0 && progress.seconds() > 60 * options.minutes);
    const bool pause = stopped || step % options.eval_every == 0 || step == options.steps;
    if (!trainer.full() && !pause) continue;
    report();
    if (!pause) continue;
    if (!stopped && step < options.steps) {
      const double score = evaluate(model, task, true);
      log.write({{"step", double(step)}, {task.score_name(), score}});
      progress.note("step " + std::to_string(step) + ": " + task.describe(score));
    }
    if (!options.save.empty()) save();
  }
  if (profiler) write_profile();
  if (profiles && step <= profile_from) progress.note("it ended before it was warm: nothing was profiled");
  const std::string where =
      "step " + std::to_string(step) + (options.save.empty() ? "" : ", saved to " + options.save);
  if (interrupt.requested())
    progress.note("interrupted at " + where);
  else
    progress.note((stopped ? "time is up at " : "trained to ") + where);
  const double speed = progress.tokens_per_second(), peak = peak_flops(device, model.config().dtype);
  const double share = peak > 0 ? 100 * speed * flops_per_token(model) / peak : 0;
  if (device != cpu && speed > 0)
    progress.note(format("%.1f k tok/s on %s", speed / 1000, device_name(device).c_str()) +
                  (progress.left_out() > 0
                       ? format(", the first %ld steps left out; ", long(progress.left_out()))
                       : std::string("; ")) +
                  (peak > 0 ? format("%.1f %% of its %.0f TFLOP/s", share, peak / 1e12)
                            : std::string("share of its peak: n/a")) +
                  ", counting 6 (P + L T C) FLOP a token");
  return !interrupt.requested();
}

std::unique_ptr<Task> make_task(const Options& options) {
  const auto seed = static_cast<uint64_t>(options.seed);
  if (options.task == "addition") {
    check(options.text.empty(), Error::Kind::Value, "--text is not for --task addition");
    check(options.tokens.empty(), Error::Kind::Value, "--tokens is not for --task addition");
    return std::make_unique<AdditionTask>(options.batch, options.context, seed);
  }
  if (!options.tokens.empty()) {
    check(options.text.empty(), Error::Kind::Value, "--text and --tokens exclude each other");
    return std::make_unique<TokenTask>(options.tokens, options.batch, options.context, seed);
  }
  const std::string text = options.text.empty() ? own_sources() : read_text(options.text);
  return std::make_unique<TextTask>(text, options.vocabulary == "bytes", options.batch, options.context,
                                    seed);
}

int run(Options& options, std::vector<Flag>& flags) {
  std::optional<Checkpoint> saved;
  if (!options.resume.empty()) {
    saved = load_checkpoint(options.resume);
    saved->settings.emplace("optimizer", "adamw");  // as it was before there were others
    take_settings(flags, saved->settings, options.resume, "train_gpt");
    if (options.text.empty() && options.tokens.empty())
      options.text = saved->settings["text"], options.tokens = saved->settings["tokens"];
  }
  take_preset(flags, options);
  for (const std::string& path : {options.save, options.profile})
    if (!path.empty()) check_can_save(path);
  if (options.threads > 0) set_num_threads(static_cast<int>(options.threads));
  manual_seed(static_cast<uint64_t>(options.seed));

  const std::unique_ptr<Task> task = make_task(options);
  Settings settings = {{"data", task->fingerprint()}};
  if (!options.text.empty()) settings["text"] = std::filesystem::absolute(options.text).string();
  if (!options.tokens.empty()) settings["tokens"] = std::filesystem::absolute(options.tokens).string();
  for (const Flag& flag : flags) settings[flag.name] = flag.text();
  check(!saved || saved->settings["data"] == settings["data"], Error::Kind::Value,
        "the text is not the one that ", options.resume, " was trained on");

  GPT model({.vocab_size = task->vocabulary_size(),
             .context = options.context,
             .layers = options.layers,
             .heads = options.heads,
             .width = options.width,
             .dropout = options.dropout,
             .gelu = options.gelu == "tanh" ? Gelu::tanh : Gelu::exact,
             .dtype = options.dtype == "f64"    ? f64
                      : options.dtype == "bf16" ? bf16
                      : options.dtype == "f16"  ? f16
                                                : f32});
  model.to(options.device);
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(options.optimizer, model);
  std::optional<LossScale> scale;
  if (options.dtype == "f16") scale.emplace(LossScaleOptions{}, options.device);
  std::printf("model: %ld layers, %ld heads, width %ld, context %ld, %.2f M parameters\n",
              long(options.layers), long(options.heads), long(options.width), long(options.context),
              double(model.parameter_count()) / 1e6);
  // An untrained model's loss is to be compared with the last one; its sums are wrong, all of them.
  const double untrained = evaluate(model, *task, options.task == "addition");
  std::printf("untrained: %s\n", task->describe(untrained).c_str());
  if (saved) {
    restore(*saved, model, *optimizer);
    if (const auto found = saved->settings.find("loss_scale"); scale && found != saved->settings.end()) {
      double state[2] = {};
      std::istringstream(found->second) >> state[0] >> state[1];
      scale->set_state(Tensor::from<double>({state[0], state[1]}));
    }
  }

  const bool ended = train(model, *optimizer, scale ? &*scale : nullptr, *task, options, settings,
                           saved ? saved->step : 0, saved ? saved->loader_position : 0);
  if (!ended) return 128 + SIGINT;
  model.train(false);
  Generator generator(static_cast<uint64_t>(options.seed));
  if (options.sample > 0)
    task->show_sample(model, {options.sample, options.temperature, &generator, options.top_k, options.top_p});
  std::printf("%s\n", task->conclude(task->score(model, false), untrained).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small GPT on text, or on sums, and shows what it learned.");
  Options options;
  std::vector<Flag> flags = add_flags(app, options);
  return run_program(app, argc, argv, "train_gpt", [&] { return run(options, flags); });
}
