#include "torus/layers/checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <memory>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "layers/compare.h"
#include "torus/core/hdf5.h"
#include "torus/layers/training.h"

namespace torus {
namespace {

const GPTConfig small{.vocab_size = 7, .context = 6, .layers = 2, .heads = 2, .width = 8, .dropout = 0.1};

// A model after a few steps, so that no state is trivial.
struct Trained {
  explicit Trained(uint64_t seed, const GPTConfig& config = small, int steps = 3)
      : generator(seed), model(config, generator), optimizer(model.named_parameters(), {.lr = 0.01}) {
    for (int i = 0; i < steps; ++i) step();
  }

  double step() {
    Tape tape;
    const Variable loss = model.loss(randint({2, 6}, 0, 7, generator), randint({2, 6}, 0, 7, generator));
    tape.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item();
  }

  std::vector<double> everything() const {
    auto all = flat_values(model);
    for (const auto& state : optimizer.states()) {
      for (const Tensor& moment : {state.first, state.second})
        for (double value : moment.to_vector<double>()) all.push_back(value);
      all.push_back(static_cast<double>(state.steps));
    }
    all.push_back(static_cast<double>(default_generator().state().seed));
    all.push_back(static_cast<double>(default_generator().state().position));
    return all;
  }

  Generator generator;  // of the weights and the data
  GPT model;
  AdamW optimizer;
};

std::string saved(const TemporaryFolder& folder) {
  manual_seed(11);
  const Trained trained(1);
  const std::string path = folder / "a.h5";
  save_checkpoint(path, make_checkpoint(trained.model, trained.optimizer));
  return path;
}

TEST(Checkpoint, RestoresEveryBit) {
  const TemporaryFolder folder;
  for (DType dtype : {f32, f64}) {
    for (bool tied : {true, false}) {
      GPTConfig config = small;
      config.dtype = dtype;
      config.tied_head = config.bias = tied;
      manual_seed(0xfedcba9876543210);
      Trained first(1, config);
      Checkpoint checkpoint = make_checkpoint(first.model, first.optimizer);
      checkpoint.vocabulary = {10, 32, 97, 0x10ffff};
      checkpoint.settings = {{"text", "/tmp/\xc3\xa9 \"x\""}, {"empty", ""}, {"steps", "3000"}};
      checkpoint.step = 3;
      checkpoint.loader_position = 5;
      save_checkpoint(folder / "a.h5", checkpoint);
      EXPECT_EQ(folder.entries(), 1);
      const auto state = first.everything();
      std::vector<double> losses;
      for (int i = 0; i < 3; ++i) losses.push_back(first.step());

      manual_seed(99);
      Trained second(2, config, 1);
      const Checkpoint loaded = load_checkpoint(folder / "a.h5");
      EXPECT_TRUE(loaded.model == config);
      EXPECT_EQ(loaded.vocabulary, checkpoint.vocabulary);
      EXPECT_EQ(loaded.settings, checkpoint.settings);
      EXPECT_EQ(loaded.step, 3);
      EXPECT_EQ(loaded.loader_position, 5);
      EXPECT_EQ(loaded.generator, checkpoint.generator);
      restore(loaded, second.model, second.optimizer);
      EXPECT_EQ(second.everything(), state);
      EXPECT_EQ(&second.model.head.value() == &second.model.tokens.weight.value(), tied);

      // What follows is the same, dropout too.
      Generator data(1);
      GPT(config, data);
      for (int i = 0; i < 3; ++i) {
        randint({2, 6}, 0, 7, data);
        randint({2, 6}, 0, 7, data);
      }
      second.generator = data;
      for (double loss : losses) EXPECT_EQ(second.step(), loss);
    }
  }
}

TEST(Checkpoint, OfAnyModule) {
  const TemporaryFolder folder;
  manual_seed(5);
  MLP first(4, 6), second(4, 6);
  AdamW optimizer(first.named_parameters()), other(second.named_parameters());
  const auto step = [](MLP& model, AdamW& adam) {
    Tape tape;
    const Variable y = model(Variable(Tensor::full({1, 4}, 0.5)));
    tape.backward(sum(y * y));
    adam.step();
    adam.zero_grad();
    return y.value().to_vector<float>();
  };
  step(first, optimizer);
  Checkpoint checkpoint = make_checkpoint(first, optimizer);
  checkpoint.settings = {{"width", "4"}};
  save_checkpoint(folder / "a.h5", checkpoint);
  const Checkpoint loaded = load_checkpoint(folder / "a.h5");
  EXPECT_FALSE(loaded.model.has_value());
  EXPECT_EQ(loaded.settings, checkpoint.settings);
  restore(loaded, second, other);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step(second, other), step(first, optimizer));
  MLP wider(4, 7);
  EXPECT_ERROR(restore(loaded, wider), Value, "[checkpoint] expected up.weight as in the model");
  GPT gpt(small);
  EXPECT_ERROR(restore(loaded, gpt), Value, "the model's configuration is not that of the checkpoint");
}

// A run with an average of its weights goes on as if it had not stopped.
TEST(Checkpoint, HoldsAverages) {
  const TemporaryFolder folder;
  for (DType dtype : {f32, bf16}) {
    GPTConfig config = small;
    config.dtype = dtype;
    manual_seed(12);
    Trained run(1, config, 0);
    ExponentialMovingAverage average(run.model.named_parameters(), 0.9);
    const auto steps = [](Trained& trained, ExponentialMovingAverage& ema) {
      trained.generator = Generator(5);
      for (int i = 0; i < 3; ++i) {
        trained.step();
        ema.update();
      }
      std::vector<double> all = trained.everything();
      for (const Tensor& each : ema.averages())
        for (double value : each.to_vector<double>()) all.push_back(value);
      return all;
    };
    steps(run, average);
    Checkpoint checkpoint = make_checkpoint(run.model, run.optimizer);
    checkpoint.averages = average.named_averages();
    save_checkpoint(folder / "a.h5", checkpoint);
    const auto expected = steps(run, average);

    manual_seed(13);
    Trained resumed(2, config, 1);
    ExponentialMovingAverage again(resumed.model.named_parameters(), 0.9);
    const Checkpoint loaded = load_checkpoint(folder / "a.h5");
    restore(loaded, resumed.model, resumed.optimizer);
    again.restore(loaded.averages);
    EXPECT_EQ(steps(resumed, again), expected) << dtype;
  }
}

// checkpoint_v1.h5 was written by the first format: parameter i holds i, its moments i + 0.5 and i + 0.25.
TEST(Checkpoint, ReadsTheFirstFormat) {
  const Checkpoint loaded = load_checkpoint(TORUS_SOURCE_DIR "/tests/layers/checkpoint_v1.h5");
  const GPTConfig config{
      .vocab_size = 3, .context = 2, .layers = 1, .heads = 1, .width = 2, .dropout = 0.25, .bias = false};
  EXPECT_TRUE(loaded.model == config);
  EXPECT_EQ(loaded.step, 9);
  EXPECT_EQ(loaded.loader_position, 4);
  EXPECT_EQ(loaded.vocabulary, (std::vector<int64_t>{97, 98, 99}));
  EXPECT_EQ(loaded.settings.at("steps"), "12");
  GPT model(config);
  AdamW optimizer(model.named_parameters());
  restore(loaded, model, optimizer);
  EXPECT_EQ(default_generator().seed(), 7u);
  ASSERT_EQ(optimizer.states().size(), 9u);
  for (size_t i = 0; i < 9; ++i) {
    const auto number = static_cast<double>(i);
    const auto& state = optimizer.states()[i];
    EXPECT_EQ(model.parameters()[i].value().to_vector<double>()[0], number);
    EXPECT_EQ(state.first.to_vector<double>()[1], number + 0.5);
    EXPECT_EQ(state.second.to_vector<double>()[1], number + 0.25);
    EXPECT_EQ(state.steps, static_cast<int64_t>(i));
  }
}

TEST(Checkpoint, KeepsEveryOptimizerAndOption) {
  const TemporaryFolder folder;
  GPTConfig config = small;
  config.kv_heads = 1;
  config.norm = NormKind::rms;
  config.post_norm = config.swiglu = config.rotary = true;
  const auto make = [](const std::string& name, const GPT& model) -> std::unique_ptr<Optimizer> {
    const auto parameters = model.named_parameters();
    if (name == "sgd") return std::make_unique<SGD>(parameters);
    if (name == "momentum") return std::make_unique<SGD>(parameters, SGDOptions{.momentum = 0.9});
    if (name == "lion") return std::make_unique<Lion>(parameters);
    return std::make_unique<Muon>(parameters);
  };
  for (const char* name : {"sgd", "momentum", "lion", "muon"}) {
    const auto step = [&](const GPT& model, Optimizer& optimizer, uint64_t seed) {
      Generator data(seed);
      Tape tape;
      tape.backward(model.loss(randint({2, 6}, 0, 7, data), randint({2, 6}, 0, 7, data)));
      optimizer.step();
      optimizer.zero_grad();
    };
    GPT first(config), second(config);
    const auto a = make(name, first), b = make(name, second);
    step(first, *a, 1);
    save_checkpoint(folder / "a.h5", make_checkpoint(first, *a));
    const Checkpoint loaded = load_checkpoint(folder / "a.h5");
    EXPECT_TRUE(loaded.model == config);
    step(first, *a, 2);
    restore(loaded, second, *b);
    step(second, *b, 2);
    EXPECT_EQ(flat_values(first), flat_values(second)) << name;
  }
}

TEST(Checkpoint, LoadsIntoAnotherDType) {
  const TemporaryFolder folder;
  const Checkpoint saved_f32 = load_checkpoint(saved(folder));
  const auto values = [&](DType dtype) {
    GPTConfig config = small;
    config.dtype = dtype;
    GPT model(config);
    restore(saved_f32, model);
    EXPECT_EQ(model.head.dtype(), dtype);
    return flat_values(model);
  };
  const auto exact = values(f32);
  EXPECT_EQ(values(f64), exact);
  EXPECT_LT(relative_error(values(bf16), exact), 0.004);
  EXPECT_LT(relative_error(values(f16), exact), 0.0005);
  GPTConfig wide = small;
  wide.dtype = f64;
  Trained trained(8, wide);
  restore(saved_f32, trained.model, trained.optimizer);
  EXPECT_EQ(flat_values(trained.model), exact);
  EXPECT_EQ(trained.optimizer.states()[0].first.dtype(), f64);
  EXPECT_EQ(trained.optimizer.states()[3].second.to_vector<double>(),
            saved_f32.optimizer.at(trained.optimizer.parameters()[3].name).second.to_vector<double>());
}

// A checkpoint of a bf16 model holds the masters, so that nothing is lost.
TEST(Checkpoint, KeepsMasterWeights) {
  const TemporaryFolder folder;
  GPTConfig config = small;
  config.dtype = bf16;
  config.dropout = 0;
  struct Mixed {
    explicit Mixed(const GPTConfig& c)
        : model(c), weights(model.named_parameters()), optimizer(weights.masters()) {}
    void step(uint64_t seed) {
      Generator data(seed);
      Tape tape;
      tape.backward(model.loss(randint({2, 6}, 0, 7, data), randint({2, 6}, 0, 7, data)));
      weights.take_gradients();
      optimizer.step();
      optimizer.zero_grad();
      weights.publish();
    }
    std::vector<double> masters() const {
      std::vector<double> result;
      for (const auto& [name, master] : weights.masters())
        for (double value : master.value().to_vector<double>()) result.push_back(value);
      return result;
    }
    GPT model;
    MasterWeights weights;
    AdamW optimizer;
  };
  Mixed first(config), second(config);
  first.step(1);
  save_checkpoint(folder / "a.h5", make_checkpoint(first.model, first.optimizer));
  const Checkpoint loaded = load_checkpoint(folder / "a.h5");
  EXPECT_EQ(loaded.weights.at("tokens.weight").dtype(), f32);
  EXPECT_EQ(loaded.model->dtype, bf16);
  restore(loaded, second.model, second.optimizer);
  EXPECT_EQ(second.masters(), first.masters());
  EXPECT_EQ(flat_values(second.model), flat_values(first.model));
  EXPECT_NE(flat_values(first.model), first.masters());
  first.step(2);
  second.step(2);
  EXPECT_EQ(second.masters(), first.masters());
}

// The same where the optimizer keeps them.
TEST(Checkpoint, KeepsMastersOfTheOptimizer) {
  const TemporaryFolder folder;
  GPTConfig config = small;
  config.dtype = bf16;
  config.dropout = 0;
  struct Narrow {
    explicit Narrow(const GPTConfig& c) : model(c), optimizer(model.named_parameters()) {}
    void step(uint64_t seed) {
      Generator data(seed);
      Tape tape;
      tape.backward(model.loss(randint({2, 6}, 0, 7, data), randint({2, 6}, 0, 7, data)));
      optimizer.step();
      optimizer.zero_grad();
    }
    std::vector<double> masters() const {
      std::vector<double> result;
      for (const auto& state : optimizer.states())
        for (double value : state.master.to_vector<double>()) result.push_back(value);
      return result;
    }
    GPT model;
    AdamW optimizer;
  };
  Narrow first(config), second(config);
  first.step(1);
  save_checkpoint(folder / "a.h5", make_checkpoint(first.model, first.optimizer));
  const Checkpoint loaded = load_checkpoint(folder / "a.h5");
  EXPECT_EQ(loaded.weights.at("tokens.weight").dtype(), f32);
  restore(loaded, second.model, second.optimizer);
  EXPECT_EQ(second.masters(), first.masters());
  EXPECT_EQ(flat_values(second.model), flat_values(first.model));
  EXPECT_NE(flat_values(first.model), first.masters());
  first.step(2);
  second.step(2);
  EXPECT_EQ(second.masters(), first.masters());
}

TEST(Checkpoint, EvaluationNeedsOnlyWeights) {
  const TemporaryFolder folder;
  const std::string path = saved(folder);
  const Checkpoint checkpoint = load_checkpoint(path);
  GPT model(checkpoint.model.value());
  manual_seed(5);
  restore(checkpoint, model);
  manual_seed(11);
  EXPECT_EQ(flat_values(model), flat_values(Trained(1).model));
  EXPECT_TRUE(checkpoint.vocabulary.empty() && checkpoint.settings.empty());
}

TEST(Checkpoint, SaysWhatIsWrongWithAFile) {
  const TemporaryFolder folder;
  const std::string path = saved(folder), content = read_file(path);
  EXPECT_ERROR(load_checkpoint(folder / "none.h5"), File, "none.h5");
  EXPECT_ERROR(load_checkpoint(folder / ""), File, "");
  for (const std::string& text : {std::string(), std::string("not HDF5 at all\n"), std::string(5000, '\0')}) {
    write_file(folder / "text.h5", text);
    EXPECT_ERROR(load_checkpoint(folder / "text.h5"), File, "text.h5");
  }
  for (size_t part = 1; part < 16; ++part) {
    write_file(folder / "cut.h5", content.substr(0, content.size() * part / 16));
    EXPECT_ERROR(load_checkpoint(folder / "cut.h5"), File, "cut.h5");
  }
  {
    auto file = Hdf5File::create(folder / "foreign.h5");
    file.write("image", Tensor::zeros({3, 4}));
    file.set_attribute("/", "version", int64_t{1});
    file.close();
  }
  EXPECT_ERROR(load_checkpoint(folder / "foreign.h5"), File,
               "foreign.h5 is an HDF5 file, but not a checkpoint of Torus");
  {
    auto file = Hdf5File::create(folder / "newer.h5");
    file.set_attribute("/", "format", std::string("torus checkpoint"));
    file.set_attribute("/", "version", int64_t{5});
    file.close();
  }
  EXPECT_ERROR(load_checkpoint(folder / "newer.h5"), File,
               "newer.h5 has format version 5; this program reads up to 4");
  {
    auto file = Hdf5File::create(folder / "bare.h5");
    file.set_attribute("/", "format", std::string("torus checkpoint"));
    file.set_attribute("/", "version", int64_t{1});
    file.close();
  }
  EXPECT_ERROR(load_checkpoint(folder / "bare.h5"), File, "bare.h5: has no 'model'");
}

// Wherever one byte is wrong, the file is refused, or the byte said nothing.
TEST(Checkpoint, NeverReadsDamagedValues) {
  const TemporaryFolder folder;
  const std::string path = saved(folder), content = read_file(path);
  const Checkpoint whole = load_checkpoint(path);
  Generator generator(3);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    std::string damaged = content;
    const auto at = static_cast<size_t>(generator.below(static_cast<int64_t>(content.size())));
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << generator.below(8)));
    write_file(path, damaged);
    try {
      const Checkpoint read = load_checkpoint(path);
      EXPECT_TRUE(read.model == whole.model && read.settings == whole.settings && read.step == whole.step &&
                  read.generator == whole.generator && read.vocabulary == whole.vocabulary)
          << at;
      for (const auto& [name, value] : whole.weights)
        ASSERT_EQ(read.weights.at(name).to_vector<float>(), value.to_vector<float>()) << at;
      for (const auto& [name, state] : whole.optimizer)
        ASSERT_EQ(read.optimizer.at(name).second.to_vector<float>(), state.second.to_vector<float>()) << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Error::Kind::File) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 150);
}

TEST(Checkpoint, AtOddsWithTheModelChangesNothing) {
  const TemporaryFolder folder;
  const Checkpoint good = load_checkpoint(saved(folder));
  const auto expect_refused = [&](const Checkpoint& checkpoint, const GPTConfig& config,
                                  const std::string& text) {
    manual_seed(21);
    Trained other(4, config);
    const auto before = other.everything();
    EXPECT_ERROR(restore(checkpoint, other.model, other.optimizer), Value, text);
    EXPECT_EQ(other.everything(), before);
  };
  GPTConfig wider = small;
  wider.width = 16;
  expect_refused(good, wider, "");
  GPTConfig dropping = small;
  dropping.dropout = 0.2;
  expect_refused(good, dropping, "the model's configuration is not that of the checkpoint");

  Checkpoint bad = good;
  bad.weights.erase("blocks.1.mlp.down.bias");
  expect_refused(bad, small, "expected the weights of blocks.1.mlp.down.bias, got none");
  bad = good;
  bad.weights["blocks.2.mlp.down.bias"] = Tensor::zeros({8});
  expect_refused(bad, small, "expected the weights of 28 parameters, got 29");
  bad = good;
  bad.weights["norm.bias"] = Tensor::zeros({9});
  expect_refused(bad, small, "expected norm.bias as in the model, f32 [8], got f32 [9]");
  bad.weights["norm.bias"] = Tensor::zeros({8}, i64);
  expect_refused(bad, small, "f32 [8], got i64 [8]");
  bad = good;
  bad.optimizer.erase("norm.bias");
  expect_refused(bad, small, "expected the optimizer's state of norm.bias, got none");
  bad = good;
  bad.optimizer.at("norm.bias").second = Tensor::zeros({1});
  expect_refused(bad, small, "the second moment of norm.bias");
  bad = good;
  bad.optimizer.at("norm.bias").second = Tensor();
  expect_refused(bad, small, "expected the second moment of norm.bias, got none");
  bad = good;
  bad.optimizer_name = "muon";
  expect_refused(bad, small, "expected the state of adamw, got that of muon");
  bad = good;
  bad.optimizer.at("norm.bias").steps = -1;
  expect_refused(bad, small, "expected steps of at least 0 for norm.bias, got -1");
}

TEST(Checkpoint, AFullDiskLeavesTheLastGoodOne) {
  const TemporaryFolder folder;
  const std::string path = saved(folder), content = read_file(path);
  const Trained other(5);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = signal(SIGXFSZ, SIG_IGN);  // so that a write fails, as on a full disk
  for (size_t part = 0; part < 8; ++part) {
    rlimit limit = before;
    limit.rlim_cur = content.size() * part / 8;
    setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT_ERROR(save_checkpoint(path, make_checkpoint(other.model, other.optimizer)), File, "a.h5");
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_EQ(read_file(path), content);
    EXPECT_EQ(folder.entries(), 1);
  }
  signal(SIGXFSZ, handler);
  EXPECT_ERROR(save_checkpoint(folder / "no/such.h5", make_checkpoint(other.model, other.optimizer)), File,
               "such.h5");
  save_checkpoint(path, make_checkpoint(other.model, other.optimizer));
  EXPECT_NE(read_file(path), content);
}

}  // namespace
}  // namespace torus
