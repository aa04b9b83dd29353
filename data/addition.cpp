#include "torus/data/addition.h"

#include <algorithm>

#include "torus/core/random.h"
#include "torus/data/permutation.h"

namespace torus {

namespace {

constexpr int64_t numbers = 1000, sequence = Addition::prompt_length + Addition::answer_length;
// The vocabulary is sorted: plus sign, digits, equals sign.
constexpr int64_t plus = 0, digit = 1, equals = 11;

// "123+456=9750" as tokens.
std::array<int64_t, sequence> tokens_of(int64_t a, int64_t b) {
  std::array<int64_t, sequence> tokens;
  auto to = tokens.begin();
  for (int64_t unit : {100, 10, 1}) *to++ = digit + a / unit % 10;
  *to++ = plus;
  for (int64_t unit : {100, 10, 1}) *to++ = digit + b / unit % 10;
  *to++ = equals;
  for (int64_t unit : {1, 10, 100, 1000}) *to++ = digit + (a + b) / unit % 10;
  return tokens;
}

}  // namespace

bool Addition::is_test(int64_t a, int64_t b) {
  const auto [low, high] = std::minmax(a, b);
  return philox({static_cast<uint32_t>(low), static_cast<uint32_t>(high), 0, 0}, 0)[0] % 10 == 0;
}

Vocabulary Addition::vocabulary() { return Vocabulary::characters("+0123456789="); }

Batch Addition::batch(int64_t index) const {
  Batch batch{Tensor::empty({batch_size_, length}, i64), Tensor::full({batch_size_, length}, no_target, i64)};
  int64_t* inputs = batch.inputs.mutable_data<int64_t>();
  int64_t* targets = batch.targets.mutable_data<int64_t>();
  for (int64_t row = 0; row < batch_size_; ++row) {
    const auto position = static_cast<uint64_t>(index * batch_size_ + row);
    int64_t a = 0, b = 0;
    uint32_t attempt = 0;
    do {
      const auto words = philox(
          {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), ++attempt, 1}, seed_);
      a = words[0] % numbers;
      b = words[1] % numbers;
    } while (is_test(a, b));
    const auto tokens = tokens_of(a, b);
    std::copy_n(tokens.begin(), length, inputs + row * length);
    // The token after input i is token i + 1; answers begin after the prompt.
    std::copy(tokens.begin() + prompt_length, tokens.end(), targets + row * length + prompt_length - 1);
  }
  return batch;
}

Addition::Questions Addition::test_questions(int64_t count) {
  std::vector<int64_t> prompts, answers;
  const Permutation order(numbers * numbers, 0);
  int64_t found = 0;
  for (int64_t i = 0; found < count; ++i) {
    check(i < order.size(), Error::Kind::Value, "[addition] there are ", found, " sums to test, asked for ",
          count);
    const int64_t pair = order(i), a = pair / numbers, b = pair % numbers;
    if (!is_test(a, b)) continue;
    const auto tokens = tokens_of(a, b);
    prompts.insert(prompts.end(), tokens.begin(), tokens.begin() + prompt_length);
    answers.insert(answers.end(), tokens.begin() + prompt_length, tokens.end());
    ++found;
  }
  return {Tensor::from(prompts, {found, prompt_length}), Tensor::from(answers, {found, answer_length})};
}

}  // namespace torus
