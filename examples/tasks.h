// What train_gpt can learn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "torus/torus.h"

/// A vocabulary, batches to train on, and a score on data that no batch holds.
class Task {
 public:
  virtual ~Task() = default;
  virtual const torus::Vocabulary& vocabulary() const = 0;
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

/// printf into a string.
template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

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

  const torus::Vocabulary& vocabulary() const override { return vocabulary_; }
  torus::Batch batch(int64_t index) const override { return windows_.batch(index); }
  std::string fingerprint() const override { return std::to_string(hash_); }

  std::string score_name() const override { return "validation_loss"; }

  /// Mean loss, each token of the held-out part weighing the same.
  double score(const torus::GPT& model, bool quick) const override {
    double sum = 0, count = 0;
    const int64_t batches = quick ? std::min<int64_t>(8, held_out_.batches()) : held_out_.batches();
    for (int64_t i = 0; i < batches; ++i) {
      const torus::Batch batch = held_out_.batch(i);
      const auto targets = static_cast<double>(batch.targets.numel());
      sum += model.loss(batch.inputs, batch.targets).item() * targets;
      count += targets;
    }
    return sum / count;
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

/// Sums of two numbers of three digits.
class AdditionTask : public Task {
 public:
  AdditionTask(int64_t batch, int64_t context, uint64_t seed) : sums_(batch, seed) {
    torus::check(context >= sums_.length, torus::Error::Kind::Value,
                 "--task addition needs a --context of at least ", sums_.length, ", got ", context);
  }

  const torus::Vocabulary& vocabulary() const override { return vocabulary_; }
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
