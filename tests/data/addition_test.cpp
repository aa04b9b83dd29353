#include "torus/data/addition.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/expect_error.h"

namespace torus {
namespace {

// "123+456=9750" read back with ordinary arithmetic.
struct Sum {
  int a, b, answer;
  explicit Sum(const std::string& text)
      : a(std::stoi(text.substr(0, 3))),
        b(std::stoi(text.substr(4, 3))),
        answer(std::stoi(std::string(text.rbegin(), text.rbegin() + 4))) {
    EXPECT_EQ(text.size(), 12u) << text;
    EXPECT_EQ(text[3], '+') << text;
    EXPECT_EQ(text[7], '=') << text;
  }
};

TEST(Addition, BatchesAreSumsToTrainOn) {
  const Addition task(64, 5);
  const Vocabulary vocabulary = Addition::vocabulary();
  EXPECT_EQ(vocabulary.size(), 12);
  std::set<std::pair<int, int>> seen;
  for (int64_t index = 0; index < 50; ++index) {
    const Batch batch = task.batch(index);
    ASSERT_EQ(batch.inputs.shape(), (Shape{64, 11}));
    ASSERT_EQ(batch.targets.shape(), (Shape{64, 11}));
    for (int64_t row = 0; row < 64; ++row) {
      const Tensor inputs = batch.inputs.select(0, row), targets = batch.targets.select(0, row);
      EXPECT_EQ(targets.slice(0, 0, 7).to_vector<int64_t>(), std::vector<int64_t>(7, no_target));
      const std::string prompt = vocabulary.decode(inputs.slice(0, 0, 8)),
                        answer = vocabulary.decode(targets.slice(0, 7, 11));
      EXPECT_EQ(vocabulary.decode(inputs.slice(0, 8, 11)), answer.substr(0, 3));
      const Sum sum(prompt + answer);
      EXPECT_EQ(sum.a + sum.b, sum.answer);
      EXPECT_FALSE(Addition::is_test(sum.a, sum.b));
      seen.emplace(sum.a, sum.b);
    }
  }
  EXPECT_GT(seen.size(), 3150u);  // 3200 draws of 900 000 sums hardly repeat
}

TEST(Addition, BatchesAreAFunctionOfSeedAndIndex) {
  const auto inputs = [](uint64_t seed, int64_t index) {
    return Addition(8, seed).batch(index).inputs.to_vector<int64_t>();
  };
  EXPECT_EQ(inputs(1, 7), inputs(1, 7));
  EXPECT_NE(inputs(1, 7), inputs(1, 8));
  EXPECT_NE(inputs(1, 7), inputs(2, 7));
  // The batch size does not matter to the stream of sums.
  const Tensor wide = Addition(16, 1).batch(3).inputs.slice(0, 8, 16);
  EXPECT_EQ(wide.to_vector<int64_t>(), inputs(1, 7));
}

TEST(Addition, SplitIsSymmetricAndAboutATenth) {
  int64_t pairs = 0, tests = 0;
  for (int64_t a = 0; a < 1000; ++a)
    for (int64_t b = a; b < 1000; ++b) {
      ++pairs;
      tests += Addition::is_test(a, b);
      ASSERT_EQ(Addition::is_test(a, b), Addition::is_test(b, a));
    }
  EXPECT_NEAR(static_cast<double>(tests), pairs * 0.1, 5 * std::sqrt(pairs * 0.09));
}

TEST(Addition, QuestionsAreDistinctAndUnseen) {
  const auto [prompts, answers] = Addition::test_questions();
  ASSERT_EQ(prompts.shape(), (Shape{10000, 8}));
  ASSERT_EQ(answers.shape(), (Shape{10000, 4}));
  const Vocabulary vocabulary = Addition::vocabulary();
  std::set<std::pair<int, int>> seen;
  int carries = 0;
  for (int64_t row = 0; row < 10000; ++row) {
    const Sum sum(vocabulary.decode(prompts.select(0, row)) + vocabulary.decode(answers.select(0, row)));
    EXPECT_EQ(sum.a + sum.b, sum.answer);
    EXPECT_TRUE(Addition::is_test(sum.a, sum.b));
    seen.emplace(sum.a, sum.b);
    carries += sum.answer >= 1000;
  }
  EXPECT_EQ(seen.size(), 10000u);
  EXPECT_NEAR(carries, 5000, 5 * 50);  // drawn from everywhere
  const Tensor fewer = Addition::test_questions(100).prompts;
  EXPECT_EQ(fewer.to_vector<int64_t>(), prompts.slice(0, 0, 100).to_vector<int64_t>());
  EXPECT_ERROR(Addition::test_questions(200000), Value, "asked for 200000");
}

}  // namespace
}  // namespace torus
