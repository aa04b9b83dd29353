#include "torus/layers/module.h"

#include <gtest/gtest.h>

#include "core/expect_error.h"
#include "torus/layers/layers.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

struct Pair : Module {
  explicit Pair(bool tie) : first(3, 2), second(3, 2, {.bias = false}), drop(0.5) {
    if (tie) second.weight = first.weight;
    scale = Parameter(Tensor::full({2}, 1));
    add("second", second);
    add("first", first);
    add("drop", drop);
    add("scale", scale);
    add("none", none);
  }
  void add_again() { add("first", scale); }
  void add_child_again() { add("scale", drop); }
  void add_named(const std::string& name) { add(name, scale); }

  Linear first, second;
  Dropout drop;
  Parameter scale, none;
};

std::vector<std::string> names(const Module& module) {
  std::vector<std::string> result;
  for (const auto& entry : module.named_parameters()) result.push_back(entry.name);
  return result;
}

TEST(Module, NamesParametersInTheOrderOfAdding) {
  const Pair pair(false);
  EXPECT_EQ(names(pair), (std::vector<std::string>{"second.weight", "first.weight", "first.bias", "scale"}));
  EXPECT_EQ(pair.parameter_count(), 2 + 6 + 6 + 2);
}

TEST(Module, TiedParameterComesOnceUnderItsFirstName) {
  Pair pair(true);
  EXPECT_EQ(names(pair), (std::vector<std::string>{"second.weight", "first.bias", "scale"}));
  EXPECT_EQ(pair.parameter_count(), 2 + 6 + 2);
  pair.parameters()[0].mutable_value().fill_(3);
  EXPECT_EQ(pair.first.weight.value().to_vector<double>(), std::vector<double>(6, 3));
  // Both uses add into the one gradient.
  {
    Tape tape;
    const Variable x(Tensor::full({1, 3}, 1));
    tape.backward(sum(pair.first(x)) + sum(pair.second(x)) * 10);
  }
  EXPECT_EQ(pair.second.weight.grad().to_vector<double>(), std::vector<double>(6, 11));
  pair.zero_grad();
  EXPECT_FALSE(pair.first.weight.grad().defined());
}

TEST(Module, EqualParametersThatAreNotTiedAreTwo) {
  Pair pair(false);
  pair.second.weight = Parameter(pair.first.weight.value());  // one storage, two parameters
  EXPECT_EQ(names(pair).size(), 4u);
}

TEST(Module, TrainReachesEveryChild) {
  Pair pair(false);
  EXPECT_TRUE(pair.training() && pair.drop.training());
  pair.train(false);
  EXPECT_FALSE(pair.training() || pair.drop.training() || pair.first.training());
  pair.train();
  EXPECT_TRUE(pair.training() && pair.drop.training());
}

TEST(Module, ListsTheModulesBelow) {
  Pair pair(false);
  EXPECT_EQ(pair.modules(), (std::vector<Module*>{&pair, &pair.second, &pair.first, &pair.drop}));
}

TEST(Module, RefusesNames) {
  Pair pair(false);
  EXPECT_ERROR(pair.add_again(), Value, "\"first\" was added twice");
  EXPECT_ERROR(pair.add_child_again(), Value, "\"scale\" was added twice");
  // Nor one that a checkpoint could not hold.
  EXPECT_ERROR(pair.add_named("a/b"), Value, "[module] expected a name without '/', not empty, got \"a/b\"");
  EXPECT_ERROR(pair.add_named(""), Value, "got \"\"");
}

}  // namespace
}  // namespace torus
