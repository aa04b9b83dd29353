#include "torus/data/text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/expect_error.h"
#include "core/temporary_folder.h"

namespace torus {
namespace {

TEST(ReadText, Errors) {
  const TemporaryFolder folder;
  write_file(folder / "good", std::string("a\0b\r\n", 5));
  EXPECT_EQ(read_text(folder / "good"), std::string("a\0b\r\n", 5));
  write_file(folder / "empty", "");
  EXPECT_ERROR(read_text(folder / "empty"), File, "empty: is empty");
  EXPECT_ERROR(read_text(folder / "none"), File, "none: No such file or directory");
  EXPECT_ERROR(read_text(folder / ""), File, "is a folder");
}

TEST(Vocabulary, Characters) {
  const std::string text = "héllo, 世界 🌍\n";
  const Vocabulary vocabulary = Vocabulary::characters(text);
  EXPECT_EQ(vocabulary.size(), 10);
  EXPECT_EQ(vocabulary.code_points(),
            (std::vector<int64_t>{'\n', ' ', ',', 'h', 'l', 'o', 0xe9, 0x4e16, 0x754c, 0x1f30d}));
  const Tensor tokens = vocabulary.encode(text);
  EXPECT_EQ(tokens.dtype(), i32);
  EXPECT_EQ(tokens.numel(), 12);
  EXPECT_EQ(vocabulary.decode(tokens), text);
  EXPECT_EQ(vocabulary.decode(tokens.to(i64).reshape({3, 4})), text);
  EXPECT_EQ(vocabulary.encode("").numel(), 0);
  EXPECT_EQ(Vocabulary::from_code_points(vocabulary.code_points()), vocabulary);
  EXPECT_ERROR(vocabulary.encode("hex"), Value,
               "the character 'e' (U+0065) at byte 1 is not one of the vocabulary's 10");
  EXPECT_ERROR(vocabulary.encode("h\t"), Value, "the character '' (U+0009) at byte 1");
  EXPECT_ERROR(vocabulary.encode("hé世é☃"), Value, "'☃' (U+2603) at byte 8");
  EXPECT_ERROR(vocabulary.decode(Tensor::from({0, 10})), Value, "token must be in [0, 10), got 10");
  EXPECT_ERROR(vocabulary.decode(Tensor::from({-1})), Value, "got -1");
  EXPECT_ERROR(vocabulary.decode(Tensor::from({1.f})), DType, "expected integers");
  EXPECT_ERROR(Vocabulary::characters(""), Value, "empty");
  for (const std::vector<int64_t>& bad :
       std::vector<std::vector<int64_t>>{{2, 1}, {1, 1}, {-1}, {0x110000}, {0xd800}})
    EXPECT_ERROR(Vocabulary::from_code_points(bad), Value, "ascending");
}

TEST(Vocabulary, Bytes) {
  const Vocabulary vocabulary = Vocabulary::bytes();
  EXPECT_EQ(vocabulary.size(), 256);
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(vocabulary.encode(all).to_vector<int64_t>(), Tensor::arange(256).to_vector<int64_t>());
  EXPECT_EQ(vocabulary.decode(vocabulary.encode(all)), all);
  EXPECT_EQ(Vocabulary::from_code_points({}), vocabulary);
}

TEST(Vocabulary, RefusesWhatIsNotUtf8) {
  for (const std::string bad :
       {"a\x80", "a\xc3", "a\xc0\x80", "a\xc1\xbf", "a\xe0\x80\x80", "a\xed\xa0\x80", "a\xf0\x80\x80\x80",
        "a\xf4\x90\x80\x80", "a\xf5\x80\x80\x80", "a\xff", "a\xe4\xb8",
        "a\xe4\xb8"
        "b"})
    EXPECT_ERROR(Vocabulary::characters(bad), Value, "byte 1 of the text is not UTF-8");
  EXPECT_EQ(Vocabulary::characters("\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf").code_points(),
            (std::vector<int64_t>{0xd7ff, 0xe000, 0x10ffff}));
}

// Every code point survives, and the code points come out sorted.
TEST(Vocabulary, AllCodePointsRoundTrip) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < 0x110000; i += i < 0x3000 ? 1 : 37)
    if (i < 0xd800 || i >= 0xe000) all.push_back(i);
  const Vocabulary vocabulary = Vocabulary::from_code_points(all);
  const std::string text = vocabulary.decode(Tensor::arange(static_cast<int64_t>(all.size())));
  EXPECT_EQ(Vocabulary::characters(text), vocabulary);
}

TEST(HeldOut, IsTheLastTenth) {
  for (int64_t count : {0, 1, 9, 10, 19, 20, 1003}) {
    const Tensor tokens = Tensor::arange(count, i32);
    const auto [train, held_out] = split_held_out(tokens);
    EXPECT_EQ(held_out.numel(), count / 10);
    std::vector<int> both = train.to_vector<int>(), rest = held_out.to_vector<int>();
    both.insert(both.end(), rest.begin(), rest.end());
    EXPECT_EQ(both, tokens.to_vector<int>());
    EXPECT_EQ(train.storage(), tokens.storage());
  }
}

// Tokens whose values are their places, so that a batch shows where it was cut.
Tensor places(int64_t count) { return Tensor::arange(count, i32); }

void expect_windows(const Batch& batch) {
  ASSERT_EQ(batch.inputs.dtype(), i64);
  ASSERT_EQ(batch.targets.dtype(), i64);
  ASSERT_EQ(batch.inputs.shape(), batch.targets.shape());
  const auto inputs = batch.inputs.to_vector<int64_t>(), targets = batch.targets.to_vector<int64_t>();
  const auto length = static_cast<size_t>(batch.inputs.size(1));
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(targets[i], inputs[i] + 1);
    ASSERT_EQ(inputs[i], inputs[i - i % length] + static_cast<int64_t>(i % length));
  }
}

RC_GTEST_PROP(TextWindows, TileTheTextOnceAnEpoch, ()) {
  const int64_t length = *rc::gen::inRange<int64_t>(1, 12), batch_size = *rc::gen::inRange<int64_t>(1, 7);
  const int64_t count = length + 1 + *rc::gen::inRange<int64_t>(0, 200);
  const TextWindows windows(places(count), batch_size, length, *rc::gen::arbitrary<uint64_t>());
  const int64_t per_epoch = windows.windows_per_epoch(), epochs = 3;
  RC_ASSERT(per_epoch >= 1);
  // An epoch leaves out less than three windows at the ends.
  RC_ASSERT(count - 1 - per_epoch * length < 2 * length || per_epoch == 1);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i * batch_size < epochs * per_epoch; ++i) {
    const Batch batch = windows.batch(i);
    expect_windows(batch);
    for (int64_t row = 0; row < batch_size; ++row)
      starts.push_back(static_cast<int64_t>(batch.inputs.select(0, row).select(0, 0).item()));
  }
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    const auto first = starts.begin() + epoch * per_epoch;
    std::vector<int64_t> sorted(first, first + per_epoch);
    std::sort(sorted.begin(), sorted.end());
    RC_ASSERT(sorted.front() >= 0);
    RC_ASSERT(sorted.back() + length < count);
    for (size_t i = 1; i < sorted.size(); ++i) RC_ASSERT(sorted[i] == sorted[i - 1] + length);
  }
}

TEST(TextWindows, ResumeAtAnyBatch) {
  const TextWindows one(places(1000), 4, 16, 42), two(places(1000), 4, 16, 42),
      other(places(1000), 4, 16, 43);
  std::vector<std::vector<int64_t>> forward;
  for (int64_t i = 0; i < 100; ++i) forward.push_back(one.batch(i).inputs.to_vector<int64_t>());
  for (int64_t i = 99; i >= 0; --i)
    EXPECT_EQ(two.batch(i).inputs.to_vector<int64_t>(), forward[static_cast<size_t>(i)]);
  EXPECT_NE(other.batch(0).inputs.to_vector<int64_t>(), forward[0]);
  EXPECT_EQ(std::set(forward.begin(), forward.end()).size(), forward.size());
}

TEST(TextWindows, EpochsDifferInOrderAndStart) {
  const TextWindows windows(places(1000), 1, 10, 1);
  const int64_t per_epoch = windows.windows_per_epoch();
  std::set<int64_t> offsets;
  std::set<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < 5; ++i)
      order.push_back(static_cast<int64_t>(windows.batch(epoch * per_epoch + i).inputs.select(1, 0).item()));
    offsets.insert(order[0] % 10);
    for (int64_t& start : order) start /= 10;
    orders.insert(order);
  }
  EXPECT_GT(offsets.size(), 5u);
  EXPECT_EQ(orders.size(), 20u);
}

TEST(TextWindows, Errors) {
  EXPECT_ERROR(TextWindows(places(16), 1, 16, 0), Value,
               "the text has 16 tokens, a window needs at least 17");
  EXPECT_ERROR(TextWindows(places(0), 1, 1, 0), Value, "the text has 0 tokens");
  EXPECT_ERROR(TextWindows(places(16), 0, 4, 0), Value, "at least 1, got 0 and 4");
  EXPECT_ERROR(TextWindows(Tensor::zeros({16}), 1, 4, 0), Shape,
               "expected one axis of integers, got f32 [16]");
  const TextWindows only(places(17), 3, 16, 0);
  EXPECT_EQ(only.windows_per_epoch(), 1);
  expect_windows(only.batch(1000));
  EXPECT_ERROR(only.batch(-1), Value, "index");
}

RC_GTEST_PROP(EvaluationWindows, CoverEachTargetOnce, ()) {
  const int64_t length = *rc::gen::inRange<int64_t>(1, 12), batch_size = *rc::gen::inRange<int64_t>(1, 7);
  const int64_t count = 2 + *rc::gen::inRange<int64_t>(0, 200);
  const EvaluationWindows windows(places(count), batch_size, length);
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < windows.batches(); ++i) {
    const Batch batch = windows.batch(i);
    expect_windows(batch);
    RC_ASSERT(batch.inputs.size(0) >= 1);
    RC_ASSERT(batch.inputs.size(0) <= batch_size);
    RC_ASSERT(batch.inputs.size(1) <= length);
    for (int64_t target : batch.targets.to_vector<int64_t>()) targets.push_back(target);
  }
  RC_ASSERT(targets == Tensor::arange(count).slice(0, 1, count).to_vector<int64_t>());
}

TEST(EvaluationWindows, Errors) {
  EXPECT_ERROR(EvaluationWindows(places(1), 2, 3), Value,
               "the text has 1 tokens, an evaluation needs at least 2");
  const EvaluationWindows windows(places(10), 2, 3);
  EXPECT_ERROR(windows.batch(2), Value, "index must be in [0, 2), got 2");
}

}  // namespace
}  // namespace torus
