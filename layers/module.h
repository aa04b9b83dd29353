// Module: named parameters and child modules, in a fixed order.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "torus/autograd/variable.h"

namespace torus {

struct NamedParameter {
  std::string name;  // "blocks.0.attention.qkv.weight"
  Parameter parameter;
};

/// For what is made from a list of parameters: throws Error{Value} "[who] ..." unless all are defined, no
/// parameter comes twice, and each has a name of its own that a checkpoint can hold.
void check_parameters(const std::string& who, const std::vector<NamedParameter>& parameters);

/// What has parameters and computes `y = module(x)`. A module holds its Parameters and child modules as
/// members and names each with `add` in its constructor. It stays where it was made: it is neither copied nor
/// moved, so that what was named cannot dangle. (Return one from a function by value; keep many in a
/// std::deque.)
class Module {
 public:
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module() = default;

  /// Its parameters and those of its children, in the order in which they were added. A parameter that is
  /// shared (tied) comes once, under its first name.
  std::vector<NamedParameter> named_parameters() const;
  std::vector<Parameter> parameters() const;
  /// Elements of all parameters.
  int64_t parameter_count() const;
  /// Drops all gradients.
  void zero_grad();
  /// This module and all below it, parents first.
  std::vector<Module*> modules();
  /// Moves the parameters to a device and drops their gradients. Optimizers, averages and masters are made
  /// after it, because their state lies where the parameters were.
  void to(Device device);

  /// Sets whether this module and its children are being trained, at first true: only then does dropout drop.
  void train(bool on = true);
  bool training() const { return training_; }

 protected:
  Module() = default;
  /// Names a member. An undefined parameter (an optional bias) is left out of the lists. Throws Error{Value}
  /// on a name that was used before, is empty or holds a '/'.
  void add(const std::string& name, Parameter& parameter);
  void add(const std::string& name, Module& child);

 private:
  void collect(const std::string& prefix, std::vector<NamedParameter>& into) const;

  struct Member {
    std::string name;
    std::variant<Parameter*, Module*> what;
  };
  void add_member(Member member);

  std::vector<Member> members_;
  bool training_ = true;
};

}  // namespace torus
