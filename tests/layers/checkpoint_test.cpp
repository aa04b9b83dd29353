#include "torus/layers/checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "layers/compare.h"
#include "torus/core/hdf5.h"

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

TEST(Checkpoint, EvaluationNeedsOnlyWeights) {
  const TemporaryFolder folder;
  const std::string path = saved(folder);
  const Checkpoint checkpoint = load_checkpoint(path);
  GPT model(checkpoint.model);
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
    file.set_attribute("/", "version", int64_t{2});
    file.close();
  }
  EXPECT_ERROR(load_checkpoint(folder / "newer.h5"), File,
               "newer.h5 has format version 2; this program reads up to 1");
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
  bad.weights["norm.bias"] = Tensor::zeros({8}, f64);
  expect_refused(bad, small, "f32 [8], got f64 [8]");
  bad = good;
  bad.optimizer.erase("norm.bias");
  expect_refused(bad, small, "expected the optimizer's state of norm.bias, got none");
  bad = good;
  bad.optimizer.at("norm.bias").second = Tensor::zeros({1});
  expect_refused(bad, small, "the second moment of norm.bias");
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
