// What train_gpt can learn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "torus/torus.h"
#include "training.h"

/// A vocabulary, batches to train on, and a score on data that no batch holds.
class Task {
 public:
  virtual ~Task() = default;
  virtual int64_t vocabulary_size() const = 0;
  /// Of its characters, for a checkpoint; empty where tokens are not characters.
  virtual std::vector<int64_t> code_points() const = 0;
  virtual torus::Batch batch(int64_t index) const = 0;
  /// Differs if the data does.
  virtual std::string fingerprint() const = 0;

  /// Of the score, in logs.
  virtual std::string score_name() const = 0;
  /// On all that is held out, or on a quick part.
  virtual double score(const torus::GPT& model, bool quick) const = 0;
  virtual std::string describe(double score) const = 0;
  virtual void show_sample(const torus::GPT& model, const torus::GenerateOptions& options) const = 0;
  /// The last line of a run: the score of all.
  virtual std::string conclude(double score, double untrained) const = 0;
};

/// The .h and .cpp files of Torus, one after another in the order of their names.
inline std::string own_sources() {
  namespace fs = std::filesystem;
  const fs::path root = TORUS_SOURCE_DIR;
  std::vector<fs::path> files;
  for (const char* room : {"core", "autograd", "ops", "layers", "data", "examples"}) {
    torus::check(fs::is_directory(root / room), torus::Error::Kind::File, "the sources of Torus are not in ",
                 root.string(), " any more: name a --text FILE");
    for (const auto& entry : fs::recursive_directory_iterator(root / room))
      if (entry.path().extension() == ".h" || entry.path().extension() == ".cpp")
        files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string all;
  for (const fs::path& file : files) all += torus::read_text(file);
  return all;
}

/// Mean loss over the first batches of what is held out, each token weighing the same.
inline double mean_loss_of(const torus::GPT& model, const torus::EvaluationWindows& held_out,
                           int64_t batches) {
  double sum = 0, count = 0;
  for (int64_t i = 0; i < std::min(batches, held_out.batches()); ++i) {
    const torus::Batch batch = held_out.batch(i);
    const auto targets = static_cast<double>(batch.targets.numel());
    sum += model.loss(batch.inputs, batch.targets).item() * targets;
    count += targets;
  }
  return sum / count;
}

/// The next character (or byte) of a text whose last tenth is held out.
class TextTask : public Task {
 public:
  TextTask(const std::string& text, bool bytes, int64_t batch, int64_t context, uint64_t seed)
      : vocabulary_(bytes ? torus::Vocabulary::bytes() : torus::Vocabulary::characters(text)),
        parts_(torus::split_held_out(vocabulary_.encode(text))),
        windows_(parts_.train, batch, context, seed),
        held_out_(parts_.held_out, 32, context) {
    for (char c : text) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    std::printf("text: %ld tokens to train on, %ld held out, a vocabulary of %ld\n",
                long(parts_.train.numel()), long(parts_.held_out.numel()), long(vocabulary_.size()));
  }

  int64_t vocabulary_size() const override { return vocabulary_.size(); }
  std::vector<int64_t> code_points() const override { return vocabulary_.code_points(); }
  torus::Batch batch(int64_t index) const override { return windows_.batch(index); }
  std::string fingerprint() const override { return std::to_string(hash_); }

  std::string score_name() const override { return "validation_loss"; }

  double score(const torus::GPT& model, bool quick) const override {
    return mean_loss_of(model, held_out_, quick ? 8 : held_out_.batches());
  }

  std::string describe(double score) const override { return format("validation loss %.3f", score); }

  /// Starts after the end of a line, if the text has lines.
  void show_sample(const torus::GPT& model, const torus::GenerateOptions& options) const override {
    const auto& points = vocabulary_.code_points();
    const auto newline = std::find(points.begin(), points.end(), '\n');
    const int64_t start = points.empty() ? '\n' : newline == points.end() ? 0 : newline - points.begin();
    const torus::Tensor tokens = generate(model, torus::Tensor::from({start}).reshape({1, 1}), options);
    std::printf("a sample:\n%s\n\n", vocabulary_.decode(tokens.slice(1, 1, tokens.size(1))).c_str());
  }

  std::string conclude(double score, double untrained) const override {
    const char* unit = vocabulary_.code_points().empty() ? "byte" : "character";
    return format("validation loss: %.3f nats a %s (untrained: %.3f)", score, unit, untrained);
  }

 private:
  torus::Vocabulary vocabulary_;
  torus::HeldOut parts_;
  torus::TextWindows windows_;
  torus::EvaluationWindows held_out_;
  uint64_t hash_ = 0xcbf29ce484222325;  // FNV-1a of the text
};

/// The next token of a file of 16-bit tokens, whose last tenth is held out.
class TokenTask : public Task {
 public:
  /// The vocabulary is that of GPT-2, or larger if the tokens need it, rounded up to a multiple of 128, which
  /// is faster.
  TokenTask(const std::string& path, int64_t batch, int64_t context, uint64_t seed)
      : parts_(torus::split_held_out(torus::read_tokens(path))),
        windows_(parts_.train, batch, context, seed),
        held_out_(parts_.held_out, 8, context) {
    int64_t largest = 50256;
    for (const torus::Tensor& part : {parts_.train, parts_.held_out}) {
      const int32_t* const tokens = part.data<int32_t>();
      for (int64_t i = 0; i < part.numel(); ++i) {
        largest = std::max<int64_t>(largest, tokens[i]);
        hash_ = (hash_ ^ static_cast<uint64_t>(tokens[i])) * 0x100000001b3;
      }
    }
    vocabulary_size_ = (largest + 128) / 128 * 128;
    std::printf("tokens: %ld to train on, %ld held out, a vocabulary of %ld\n", long(parts_.train.numel()),
                long(parts_.held_out.numel()), long(vocabulary_size_));
  }

  int64_t vocabulary_size() const override { return vocabulary_size_; }
  std::vector<int64_t> code_points() const override { return {}; }
  torus::Batch batch(int64_t index) const override { return windows_.batch(index); }
  std::string fingerprint() const override { return std::to_string(hash_); }

  std::string score_name() const override { return "validation_loss"; }
  double score(const torus::GPT& model, bool quick) const override {
    return mean_loss_of(model, held_out_, quick ? 8 : 64);
  }
  std::string describe(double score) const override { return format("validation loss %.3f", score); }
  void show_sample(const torus::GPT& model, const torus::GenerateOptions& options) const override {
    const torus::Tensor tokens = generate(
        model, torus::Tensor::from({parts_.held_out.to_vector<int64_t>()[0]}).reshape({1, 1}), options);
    std::printf("a sample:");
    for (int64_t token : tokens.to_vector<int64_t>()) std::printf(" %ld", long(token));
    std::printf("\n\n");
  }
  std::string conclude(double score, double untrained) const override {
    return format("validation loss: %.3f nats a token (untrained: %.3f)", score, untrained);
  }

 private:
  torus::HeldOut parts_;
  torus::TextWindows windows_;
  torus::EvaluationWindows held_out_;
  int64_t vocabulary_size_ = 0;
  uint64_t hash_ = 0xcbf29ce484222325;  // FNV-1a of the tokens
};

/// Sums of two numbers of three digits.
class AdditionTask : public Task {
 public:
  AdditionTask(int64_t batch, int64_t context, uint64_t seed) : sums_(batch, seed) {
    torus::check(context >= sums_.length, torus::Error::Kind::Value,
                 "--task addition needs a --context of at least ", sums_.length, ", got ", context);
  }

  int64_t vocabulary_size() const override { return vocabulary_.size(); }
  std::vector<int64_t> code_points() const override { return vocabulary_.code_points(); }
  torus::Batch batch(int64_t index) const override { return sums_.batch(index); }
  std::string fingerprint() const override { return "addition"; }

  std::string score_name() const override { return "exact_match"; }

  /// The fraction of sums whose four digits are all right, each the likeliest.
  double score(const torus::GPT& model, bool quick) const override {
    constexpr int64_t rows = 500;  // at once
    const int64_t count = quick ? 2 * rows : questions_.prompts.size(0);
    int64_t right = 0;
    for (int64_t first = 0; first < count; first += rows) {
      const auto all = answered(model, first, first + rows);
      const auto given = all.slice(1, sums_.prompt_length, all.size(1)).template to_vector<int64_t>();
      const auto wanted = questions_.answers.slice(0, first, first + rows).to_vector<int64_t>();
      for (auto w = wanted.begin(), g = given.begin(); w != wanted.end();
           w += sums_.answer_length, g += sums_.answer_length)
        right += std::equal(w, w + sums_.answer_length, g);
    }
    return static_cast<double>(right) / static_cast<double>(count);
  }

  std::string describe(double score) const override {
    // Rounded down: 100.0 % is without a fault.
    return format("exact match: %.1f %%", std::floor(1000 * score + 1e-9) / 10);
  }

  void show_sample(const torus::GPT& model, const torus::GenerateOptions&) const override {
    const torus::Tensor some = answered(model, 0, 5);
    std::printf("unseen sums, answers with the last digit first:\n");
    for (int64_t i = 0; i < some.size(0); ++i)
      std::printf("  %s\n", vocabulary_.decode(some.select(0, i)).c_str());
  }

  std::string conclude(double score, double) const override {
    return describe(score) + format(" (%ld unseen sums)", long(questions_.prompts.size(0)));
  }

 private:
  // Questions [first, last) with the model's answers.
  torus::Tensor answered(const torus::GPT& model, int64_t first, int64_t last) const {
    return generate(model, questions_.prompts.slice(0, first, last),
                    {.count = sums_.answer_length, .temperature = 0});
  }

  torus::Addition sums_;
  torus::Vocabulary vocabulary_ = torus::Addition::vocabulary();
  torus::Addition::Questions questions_ = torus::Addition::test_questions();
};
