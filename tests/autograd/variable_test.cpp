#include "torus/autograd/variable.h"

#include <gtest/gtest.h>

#include "autograd/test_ops.h"
#include "core/expect_error.h"

namespace torus {
namespace {

using namespace torus::test;
using Values = std::vector<double>;

Values values(const Tensor& tensor) { return tensor.to_vector<double>(); }

Variable leaf(std::initializer_list<double> numbers) { return Variable(Tensor::from(numbers), true); }

// Keeps what it is given.
GradientHook keep(std::vector<Values>& seen) {
  return [&seen](const Tensor& grad) {
    seen.push_back(values(grad));
    return Tensor();
  };
}

GradientHook scaled(double by) {
  return [by](const Tensor& grad) { return times(grad, Tensor::scalar(by, f64)); };
}

// One that is used three times, by two nodes, hands its hooks the sum of all.
TEST(Hooks, SeeTheCompleteGradientOnce) {
  const Variable x = leaf({2, 3}), other = leaf({5, 7});
  const Parameter weight(Tensor::from({1., 10.}));
  std::vector<Values> of_x, of_weight, of_y, of_loss;
  x.on_gradient(keep(of_x));
  weight.on_gradient(keep(of_weight));
  for (int step = 1; step <= 2; ++step) {
    Tape tape;
    const Variable y = mul(x, weight);
    y.on_gradient(keep(of_y));
    const Variable loss = sum(add(mul(y, y), add(mul(x, weight), mul(x, other))));
    loss.on_gradient(keep(of_loss));
    tape.backward(loss);
    // y^2 + x w + x o: by y 2 y, by x 2 y w + w + o, by w 2 y x + x. Without what earlier steps added.
    ASSERT_EQ(static_cast<int>(of_x.size()), step);
    EXPECT_EQ(of_x.back(), (Values{2 * 2 + 1 + 5, 2 * 30 * 10 + 10 + 7}));
    ASSERT_EQ(static_cast<int>(of_weight.size()), step);
    EXPECT_EQ(of_weight.back(), (Values{2 * 2 * 2 + 2, 2 * 30 * 3 + 3}));
    ASSERT_EQ(static_cast<int>(of_y.size()), step);
    EXPECT_EQ(of_y.back(), (Values{4, 60}));
    ASSERT_EQ(static_cast<int>(of_loss.size()), step);
    EXPECT_EQ(of_loss.back(), (Values{1}));
    EXPECT_EQ(values(x.grad()), (Values{step * 10., step * 617.}));
    EXPECT_EQ(values(weight.grad()), (Values{step * 10., step * 183.}));
  }
}

TEST(Hooks, ReplaceTheGradient) {
  const Variable x = leaf({2, 3});
  x.on_gradient(scaled(10));
  Tape tape;
  const Variable y = mul(x, x);
  std::vector<Values> seen;
  y.on_gradient(scaled(2));
  y.on_gradient(scaled(3));  // after the first
  y.on_gradient(keep(seen));
  const Variable loss = sum(y);
  tape.backward(loss, {.keep_graph = true});
  EXPECT_EQ(seen, (std::vector<Values>{{6, 6}}));
  EXPECT_EQ(values(x.grad()), (Values{10 * 6 * 4, 10 * 6 * 6}));
  tape.backward(loss);  // hooks stay with a graph that is kept
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_EQ(values(x.grad()), (Values{2 * 240, 2 * 360}));
}

TEST(Hooks, AreRemoved) {
  const Variable x = leaf({2});
  std::vector<Values> seen;
  HookHandle first = x.on_gradient(keep(seen)), once;
  x.on_gradient(keep(seen));  // its handle is dropped
  int calls = 0;
  once = x.on_gradient([&](const Tensor&) {  // removes itself
    ++calls;
    once.remove();
    return Tensor();
  });
  const auto step = [&] {
    Tape tape;
    const Variable y = mul(x, x);
    HookHandle handle = y.on_gradient(scaled(100));
    handle.remove();
    handle.remove();
    tape.backward(y);
  };
  step();
  EXPECT_EQ(seen.size(), 2u);
  first.remove();
  step();
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen.back(), Values{4});
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(x.grad().item(), 8);
  HookHandle late;
  late.remove();
  {
    const Variable gone = leaf({1});
    late = gone.on_gradient(keep(seen));
  }
  late.remove();
}

// Added between forward and backward, and on a leaf that is itself the loss.
TEST(Hooks, MayComeLate) {
  const Variable x = leaf({2});
  std::vector<Values> seen;
  Tape tape;
  const Variable y = mul(x, x), loss = mul(y, y);
  x.on_gradient(keep(seen));
  y.on_gradient(keep(seen));
  tape.backward(loss);
  EXPECT_EQ(seen, (std::vector<Values>{{8}, {32}}));
  tape.backward(x);
  EXPECT_EQ(seen.back(), Values{1});
  EXPECT_EQ(x.grad().item(), 33);
}

TEST(Hooks, SeveralOutputsOfOneNode) {
  const Variable x = leaf({3});
  std::vector<Values> first, second;
  Tape tape;
  const auto outputs = powers(x);
  outputs[0].on_gradient(keep(first));
  outputs[1].on_gradient(scaled(5));
  outputs[1].on_gradient(keep(second));
  tape.backward(mul(outputs[1], outputs[1]));
  EXPECT_TRUE(first.empty());  // it got no gradient
  EXPECT_EQ(second, (std::vector<Values>{{5 * 18}}));
  EXPECT_EQ(x.grad().item(), 90 * 6);
}

TEST(Hooks, AreCalledInsideRecompute) {
  const Variable x = leaf({2, 3});
  const Parameter weight(Tensor::from({1., 10.}));
  std::vector<Values> of_weight, inside;
  weight.on_gradient(keep(of_weight));
  const auto block = [&](const Variable& v) {
    const Variable y = mul(v, weight);
    y.on_gradient(keep(inside));
    return y;
  };
  std::vector<std::vector<Values>> results;
  for (bool again : {false, true}) {
    of_weight.clear();
    inside.clear();
    Tape tape;
    // The weight is used inside two of them and outside: its gradient is complete only at the end.
    Variable y = again ? recompute(block, x) : block(x);
    y = again ? recompute(block, y) : block(y);
    tape.backward(sum(mul(y, weight)));
    ASSERT_EQ(of_weight.size(), 1u);
    EXPECT_EQ(inside.size(), 2u);
    results.push_back({of_weight[0], inside[0], inside[1]});
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0][0], (Values{3 * 2, 3 * 3 * 100}));
}

TEST(Hooks, OfAnInnerTape) {
  const Variable x = leaf({3});
  std::vector<Values> of_x, of_y;
  x.on_gradient(keep(of_x));
  Tape outer;
  const Variable y = mul(x, x);
  y.on_gradient(keep(of_y));
  {
    Tape inner;
    inner.backward(mul(y, x));  // y is a leaf here: its hooks wait for the tape that recorded it
  }
  EXPECT_TRUE(of_y.empty());
  EXPECT_EQ(of_x, (std::vector<Values>{{9}}));
  outer.backward(y);
  EXPECT_EQ(of_y, (std::vector<Values>{{1}}));
  EXPECT_EQ(of_x.back(), Values{6});
}

TEST(Hooks, LeaveNothingBehind) {
  const auto held = std::make_shared<int>(1);
  const auto hook = [held](const Tensor&) { return Tensor(); };
  const Variable x = leaf({2});
  {
    Tape tape;
    const Variable walked = mul(x, x), not_walked = mul(x, x);
    walked.on_gradient(hook);
    not_walked.on_gradient(hook);
    EXPECT_EQ(held.use_count(), 4);
    tape.backward(walked);
    EXPECT_EQ(held.use_count(), 3);  // freed with what the node saved
  }
  EXPECT_EQ(held.use_count(), 2);
}

// A hook records nothing, and what it keeps or returns is its own memory.
TEST(Hooks, RecordNothingAndShareNoMemory) {
  const Variable x = leaf({2});
  Tensor kept;
  const Tensor returned = Tensor::from({7.});
  HookHandle handle = x.on_gradient([&](const Tensor& grad) {
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_FALSE(mul(x, x).requires_grad());
    kept = grad;
    return Tensor();
  });
  {
    Tape tape;
    tape.backward(mul(x, x));
  }
  EXPECT_NE(kept.storage(), x.grad().storage());
  handle.remove();
  x.on_gradient([&](const Tensor&) { return returned; });
  Variable other = x;
  other.zero_grad();
  {
    Tape tape;
    tape.backward(mul(x, x));
  }
  EXPECT_EQ(x.grad().item(), 7);
  EXPECT_NE(returned.storage(), x.grad().storage());
}

TEST(Hooks, Errors) {
  const Variable x = leaf({2, 3});
  Variable y;
  const auto nothing = [](const Tensor&) { return Tensor(); };
  {
    Tape tape;
    y = mul(x, x);
    HookHandle handle = y.on_gradient([](const Tensor&) { return Tensor::zeros({3}, f64); });
    EXPECT_ERROR(tape.backward(sum(y)), Shape,
                 "[on_gradient] a hook must return f64 [2] on cpu, got f64 [3]");
    handle.remove();
    y.on_gradient([](const Tensor& grad) { return grad.to(f32); });
    EXPECT_ERROR(tape.backward(sum(y)), Shape, "got f32 [2] on cpu");
  }
  EXPECT_ERROR(y.on_gradient(nothing), Value,
               "[on_gradient] the variable was recorded on a tape that is gone");
  EXPECT_ERROR(Variable().on_gradient(nothing), Value, "[on_gradient] the variable is undefined");
  EXPECT_ERROR(x.on_gradient(GradientHook()), Value, "[on_gradient] expected a hook, got an empty function");
  // What wants no gradient never gets one: the same code runs in evaluation.
  Variable(Tensor::from({1.})).on_gradient([](const Tensor&) -> Tensor {
    fail(Error::Kind::Value, "called");
  });
  // An error in a hook leaves the tape usable.
  Tape tape;
  const Variable z = mul(x, x), loss = sum(z);
  HookHandle handle = z.on_gradient([](const Tensor&) -> Tensor { fail(Error::Kind::Value, "in a hook"); });
  EXPECT_ERROR(tape.backward(loss, {.keep_graph = true}), Value, "in a hook");
  handle.remove();
  x.on_gradient(scaled(2));
  tape.backward(loss, {.keep_graph = true});
  EXPECT_EQ(values(x.grad()), (Values{8, 12}));
}

}  // namespace
}  // namespace torus
