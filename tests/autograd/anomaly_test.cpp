#include "torus/autograd/anomaly.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "autograd/test_ops.h"
#include "core/expect_error.h"
#include "torus/core/profiler.h"

namespace torus {
namespace {

using namespace torus::test;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double bad_values[] = {std::nan(""), inf, -inf};
constexpr const char* bad_names[] = {"NaN", "+inf", "-inf"};

// x with one element set, and gradients of ones with one element set.
Variable planted(const Variable& x, int64_t at, double value, int64_t gradient_at = -1, double gradient = 0,
                 Infinities infinities = Infinities::none) {
  Tensor y = x.value().clone();
  if (at >= 0) y.mutable_data<double>()[at] = value;
  return record(
      "planted", {x}, y,
      [=](const OutputGrads& grads) -> std::vector<Tensor> {
        Tensor dx = grads[0].clone();
        if (gradient_at >= 0) dx.mutable_data<double>()[gradient_at] = gradient;
        return {dx};
      },
      infinities);
}

Variable ones(const Shape& shape) { return Variable(Tensor::full(shape, 1, f64), true); }

TEST(AnomalyMode, NamesTheOpThatMadeItForward) {
  for (int kind = 0; kind < 3; ++kind)
    for (bool taped : {true, false}) {
      const AnomalyMode anomaly;
      const Variable x = ones({2, 3});
      std::optional<Tape> tape;
      if (taped) tape.emplace();
      const Variable y = mul(x, x);
      EXPECT_ERROR(planted(y, 4, bad_values[kind]), Value,
                   std::string("[planted] forward made ") + bad_names[kind] +
                       ": output 0, f64 [2, 3] holds it in 1 of 6 elements, first at [1, 1] (" +
                       (taped ? "node 1" : "not recorded") + ", inputs f64 [2, 3], outputs f64 [2, 3])");
    }
}

TEST(AnomalyMode, NamesTheOpThatMadeItBackward) {
  for (int kind = 0; kind < 3; ++kind)
    for (bool hidden : {false, true}) {  // recorded while the mode was off
      std::optional<AnomalyMode> anomaly;
      if (!hidden) anomaly.emplace();
      const Variable x = ones({2, 3});
      Tape tape;
      const Variable y = planted(mul(x, x), -1, 0, 5, bad_values[kind]), loss = sum(mul(y, y));
      if (hidden) anomaly.emplace();
      EXPECT_ERROR(
          tape.backward(loss), Value,
          std::string("[planted] backward made ") + bad_names[kind] +
              ": the gradient of input 0, f64 [2, 3] holds it in 1 of 6 elements, first at [1, 2] (node 1, " +
              (hidden ? "recorded outside AnomalyMode)" : "inputs f64 [2, 3], outputs f64 [2, 3])"));
    }
}

TEST(AnomalyMode, TellsTheScopesWhereTheOpRan) {
  const AnomalyMode anomaly;
  const Variable x = ones({2});
  Tape tape;
  Variable y;
  {
    const ProfileScope step("step");
    {
      const ProfileScope block(std::string("block 3"));
      y = planted(x, -1, 0, 0, inf);
    }
    EXPECT_ERROR(planted(x, 0, inf), Value, "node 1 in \"step\", inputs");
  }
  EXPECT_ERROR(tape.backward(sum(y)), Value, "node 0 in \"step/block 3\", inputs f64 [2], outputs f64 [2])");
}

TEST(AnomalyMode, TellsWhatComesFromTheUser) {
  const AnomalyMode anomaly;
  const Variable bad(Tensor::from({1., std::nan("")}), true), huge(Tensor::from({inf, inf}), true);
  Tape tape;
  EXPECT_ERROR(
      mul(ones({2}), bad), Value,
      "[mul] forward was given NaN: output 0, f64 [2] holds it in 1 of 2 elements, first at [1]; input "
      "1, f64 [2] holds it in 1 of 2 elements, first at [1] (node 0");
  EXPECT_ERROR(mul(ones({2}), huge), Value, "[mul] forward was given +inf");
  EXPECT_ERROR(mul(Variable(Tensor::from({0., 0.})), huge), Value, "[mul] forward made NaN");
  const Variable y = mul(ones({2}), ones({2}));
  EXPECT_ERROR(tape.backward(y, {.seed = Tensor::from({1., inf})}), Value,
               "[mul] backward was given +inf: the gradient of output 0, f64 [2]");
}

// A mask of -inf travels through ops that hand it on, but an op that makes a NaN of it is caught.
TEST(AnomalyMode, LetsAMaskPass) {
  const AnomalyMode anomaly;
  const Variable mask(Tensor::from({0., -inf}));
  Tape tape;
  const Variable masked = add(ones({3, 2}), mask);
  EXPECT_EQ(masked.value().to_vector<double>()[1], -inf);
  EXPECT_ERROR(add(masked, Variable(Tensor::from({0., inf}))), Value, "[add] forward made NaN");
  EXPECT_ERROR(mul(masked, Variable(Tensor::from({1., -1.}))), Value, "[mul] forward made +inf");
}

// What an op may make by its definition, as the log-sum-exp of nothing.
TEST(AnomalyMode, AcceptsDeclaredInfinities) {
  const AnomalyMode anomaly;
  const Variable x = ones({2});
  Tape tape;
  EXPECT_EQ(planted(x, 0, -inf, -1, 0, Infinities::negative).value().to_vector<double>()[0], -inf);
  EXPECT_EQ(planted(x, 0, inf, -1, 0, Infinities::both).value().to_vector<double>()[0], inf);
  EXPECT_ERROR(planted(x, 0, inf, -1, 0, Infinities::negative), Value, "[planted] forward made +inf");
  for (Infinities infinities : {Infinities::negative, Infinities::both})
    EXPECT_ERROR(planted(x, 0, std::nan(""), -1, 0, infinities), Value, "[planted] forward made NaN");
  const Variable y = planted(x, -1, 0, 1, -inf, Infinities::both);  // says nothing about gradients
  EXPECT_ERROR(tape.backward(sum(y)), Value, "[planted] backward made -inf");
}

TEST(AnomalyMode, LooksAtEveryOutputAndDType) {
  const AnomalyMode anomaly;
  const Variable x = ones({2});
  for (DType dtype : {f64, f32, f16, bf16}) {
    // Strided, and beside an output of integers.
    Tensor bad = Tensor::zeros({3, 2}, dtype);
    bad.select(1, 0).fill_(-inf);
    const Tensor outputs[] = {Tensor::arange(3), bad.transpose(0, 1)};
    std::ostringstream expected;
    expected << "output 1, " << dtype << " [2, 3] holds it in 3 of 6 elements, first at [0, 0]";
    EXPECT_ERROR(record("several", std::span(&x, 1), outputs,
                        [](const OutputGrads&) { return std::vector<Tensor>(1); }),
                 Value, expected.str());
  }
  // Empty, one element, and the limits of a dtype are nothing strange.
  EXPECT_ERROR(planted(ones({}), 0, inf), Value, "f64 [] holds it in 1 of 1 elements, first at []");
  EXPECT_EQ(mul(ones({0, 2}), ones({2})).numel(), 0);
  planted(x, 0, std::numeric_limits<double>::max());
  planted(x, 0, std::numeric_limits<double>::denorm_min());
}

TEST(AnomalyMode, SeesSumsOverflow) {
  const AnomalyMode anomaly;
  const double most = std::numeric_limits<double>::max();
  const Tensor seed = Tensor::from({1., most});
  {  // in the gradient of a leaf, by a second backward
    const Variable x = ones({2});
    Tape tape;
    tape.backward(add(x, ones({2})), {.seed = seed});
    EXPECT_ERROR(tape.backward(add(x, ones({2})), {.seed = seed}), Value,
                 "[add] backward summed to +inf: the gradient of input 0 with what was there before, f64 [2] "
                 "holds it in 1 of 2 elements, first at [1] (node 1");
  }
  {  // in a value that is used twice
    const Variable x = ones({2});
    Tape tape;
    const Variable y = mul(x, x);
    EXPECT_ERROR(tape.backward(add(y, y), {.seed = seed}), Value,
                 "[add] backward summed to +inf: the gradient of input 1 with what was there before");
  }
}

TEST(AnomalyMode, SeesWhatHooksReturn) {
  const AnomalyMode anomaly;
  const auto spoil = [](const Tensor& grad) { return Tensor::full(grad.shape(), inf, f64); };
  for (bool leaf : {true, false}) {
    const Variable x = ones({2});
    Tape tape;
    const Variable y = mul(x, x);
    (leaf ? x : y).on_gradient(spoil);
    EXPECT_ERROR(
        tape.backward(sum(y)), Value,
        leaf ? "[on_gradient] backward was handed +inf: the gradient of a leaf, f64 [2] holds it in 2 of "
               "2 elements, first at [0] (by one of its hooks)"
             : "[mul] backward was given +inf: the gradient of output 0, f64 [2]");
  }
}

TEST(AnomalyMode, NamesTheOpInsideRecompute) {
  const AnomalyMode anomaly;
  const Variable x = ones({2});
  Tape tape;
  EXPECT_ERROR(recompute([](const Variable& v) { return planted(v, 0, inf); }, x), Value,
               "[planted] forward made +inf");
  EXPECT_EQ(Tape::current(), &tape);
  const Variable y = recompute([](const Variable& v) { return planted(mul(v, v), -1, 0, 0, inf); }, x);
  EXPECT_ERROR(tape.backward(sum(y)), Value, "[planted] backward made +inf");
}

TEST(AnomalyMode, IsOffOutsideAndOfItsThread) {
  const Variable x = ones({2});
  EXPECT_FALSE(AnomalyMode::active());
  const auto spoiled = [&] { return planted(x, 0, inf, 1, inf); };
  spoiled();
  {
    const AnomalyMode anomaly;
    {
      const AnomalyMode off(false);
      spoiled();
      const AnomalyMode on_again;
      EXPECT_ERROR(spoiled(), Value, "[planted]");
    }
    EXPECT_ERROR(spoiled(), Value, "[planted]");
    std::thread([&] {
      EXPECT_FALSE(AnomalyMode::active());
      spoiled();
    }).join();
  }
  Tape tape;
  tape.backward(sum(spoiled()));
  EXPECT_EQ(x.grad().to_vector<double>()[1], inf);
  EXPECT_EQ(detail::scope_listeners, 0);
}

}  // namespace
}  // namespace torus
