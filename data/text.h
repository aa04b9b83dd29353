// Text as tokens: vocabularies, the held-out part, windows to train on and to evaluate.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torus/core/tensor.h"
#include "torus/data/loader.h"

namespace torus {

/// The bytes of a file. Throws Error{File} where it is missing, a folder, unreadable or empty.
std::string read_text(const std::string& path);

/// The tokens of a text: its bytes, or its characters (Unicode code points, UTF-8).
class Vocabulary {
 public:
  /// 256 tokens: any text.
  static Vocabulary bytes();
  /// The characters that occur in a text, in ascending order. Throws Error{Value} where it is not UTF-8.
  static Vocabulary characters(const std::string& text);
  /// From what code_points() gave, as a checkpoint keeps it.
  static Vocabulary from_code_points(std::vector<int64_t> code_points);

  int64_t size() const { return code_points_.empty() ? 256 : static_cast<int64_t>(code_points_.size()); }
  /// Of token 0, 1, ...; empty for bytes.
  const std::vector<int64_t>& code_points() const { return code_points_; }

  /// [N], i32. Throws Error{Value} on a character outside the vocabulary, naming it and its place.
  Tensor encode(const std::string& text) const;
  /// Of tokens in any shape and integer dtype.
  std::string decode(const Tensor& tokens) const;

  bool operator==(const Vocabulary&) const = default;

 private:
  std::vector<int64_t> code_points_;
};

/// Tokens of a file of 16-bit numbers (little-endian): [N], i32. A header of llm.c (256 numbers of 32 bits:
/// 20240520, version 1, how many tokens) is recognised and left out. Throws Error{File} where the file cannot
/// be read, or is not as long as it says.
Tensor read_tokens(const std::string& path);

/// A text in two contiguous parts, both views: the last tenth is held out.
struct HeldOut {
  Tensor train, held_out;
};
HeldOut split_held_out(const Tensor& tokens);

/// Windows of T + 1 tokens in random order, T inputs and T targets. In each epoch windows that share only
/// their borders tile the text from a random start, so that every token is a target about once an epoch;
/// batches run on across epochs. A batch is a function of (seed, index) alone: a loader resumes at any index.
class TextWindows {
 public:
  /// tokens [N], any integer dtype. Throws Error{Value} where N < T + 1.
  TextWindows(const Tensor& tokens, int64_t batch_size, int64_t length, uint64_t seed);

  Batch batch(int64_t index) const;
  int64_t windows_per_epoch() const { return per_epoch_; }

 private:
  Tensor tokens_;
  int64_t batch_size_, length_, per_epoch_;
  uint64_t seed_;
};

/// Windows in order, which together have each token but the first as a target once. The last batches may be
/// smaller, so a mean over all weighs each batch by targets.numel().
class EvaluationWindows {
 public:
  /// tokens [N], any integer dtype, N >= 2.
  EvaluationWindows(const Tensor& tokens, int64_t batch_size, int64_t length);

  int64_t batches() const;
  Batch batch(int64_t index) const;

 private:
  Tensor tokens_;
  int64_t batch_size_, length_;
};

}  // namespace torus
