// Sums of two numbers of three digits, as text: "123+456=" and the answer, least significant digit first,
// "9750".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "torus/data/loader.h"
#include "torus/data/text.h"

namespace torus {

/// The task: numbers from 000 to 999, all of fixed width. A hash of the unordered pair decides whether a sum
/// may be tested or trained on, so a + b and b + a are on the same side, whatever the seed.
class Addition {
 public:
  static constexpr int64_t prompt_length = 8, answer_length = 4;
  /// Tokens that a model sees at once: prompt and answer, but for the last digit.
  static constexpr int64_t length = prompt_length + answer_length - 1;

  Addition(int64_t batch_size, uint64_t seed) : batch_size_(batch_size), seed_(seed) {}

  /// Sums to train on: [B, length]; only the answer's digits are targets, the rest is `no_target`. A function
  /// of (seed, index) alone.
  Batch batch(int64_t index) const;

  /// The characters "+0123456789=".
  static Vocabulary vocabulary();
  /// About one unordered pair in ten.
  static bool is_test(int64_t a, int64_t b);

  struct Questions {
    Tensor prompts, answers;  // [count, prompt_length] and [count, answer_length], i64
  };
  /// Distinct sums that no batch holds, in a fixed random order. Throws Error{Value} for more than there are.
  static Questions test_questions(int64_t count = 10000);

 private:
  int64_t batch_size_;
  uint64_t seed_;
};

}  // namespace torus
