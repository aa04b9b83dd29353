#include "torus/layers/module.h"

#include <algorithm>
#include <map>
#include <set>

namespace torus {

namespace {

// HDF5 takes '/' for a group in a group.
bool can_be_saved(const std::string& name) { return !name.empty() && name.find('/') == std::string::npos; }

}  // namespace

void check_parameters(const std::string& who, const std::vector<NamedParameter>& parameters) {
  std::set<std::string> names;
  std::map<const Tensor*, std::string> values;  // handles of one parameter refer to one value
  for (const auto& [name, parameter] : parameters) {
    check(can_be_saved(name), Error::Kind::Value, "[", who, "] expected names without '/', not empty, got \"",
          name, '"');
    check(parameter.defined(), Error::Kind::Value, "[", who, "] expected defined parameters, got ", name,
          " undefined");
    check(names.insert(name).second, Error::Kind::Value, "[", who, "] expected a name a parameter, got two ",
          name);
    const auto [first, is_new] = values.emplace(&parameter.value(), name);
    check(is_new, Error::Kind::Value, "[", who, "] expected each parameter once, got one as ", first->second,
          " and as ", name);
  }
}

void Module::add_member(Member member) {
  check(can_be_saved(member.name), Error::Kind::Value,
        "[module] expected a name without '/', not empty, got \"", member.name, '"');
  check(std::none_of(members_.begin(), members_.end(),
                     [&](const Member& other) { return other.name == member.name; }),
        Error::Kind::Value, "[module] \"", member.name, "\" was added twice");
  members_.push_back(std::move(member));
}

void Module::add(const std::string& name, Parameter& parameter) { add_member({name, &parameter}); }

void Module::add(const std::string& name, Module& child) { add_member({name, &child}); }

void Module::collect(const std::string& prefix, std::vector<NamedParameter>& into) const {
  for (const auto& [name, what] : members_) {
    if (const auto* child = std::get_if<Module*>(&what))
      (*child)->collect(prefix + name + ".", into);
    else if (const Parameter& parameter = *std::get<Parameter*>(what); parameter.defined())
      into.push_back({prefix + name, parameter});
  }
}

std::vector<NamedParameter> Module::named_parameters() const {
  std::vector<NamedParameter> all, result;
  collect("", all);
  for (NamedParameter& entry : all) {
    // Handles of one parameter refer to one value.
    const Tensor* value = &entry.parameter.value();
    const bool seen = std::any_of(result.begin(), result.end(), [=](const NamedParameter& other) {
      return &other.parameter.value() == value;
    });
    if (!seen) result.push_back(std::move(entry));
  }
  return result;
}

std::vector<Parameter> Module::parameters() const {
  std::vector<Parameter> result;
  for (NamedParameter& entry : named_parameters()) result.push_back(std::move(entry.parameter));
  return result;
}

int64_t Module::parameter_count() const {
  int64_t count = 0;
  for (const Parameter& parameter : parameters()) count += parameter.numel();
  return count;
}

void Module::zero_grad() {
  for (Parameter& parameter : parameters()) parameter.zero_grad();
}

std::vector<Module*> Module::modules() {
  std::vector<Module*> result{this};
  for (const auto& [name, what] : members_)
    if (const auto* child = std::get_if<Module*>(&what))
      for (Module* below : (*child)->modules()) result.push_back(below);
  return result;
}

void Module::to(Device device) {
  for (Parameter& parameter : parameters()) {
    parameter.mutable_value() = parameter.value().to(device);
    parameter.zero_grad();
  }
}

void Module::train(bool on) {
  training_ = on;
  for (const auto& [name, what] : members_)
    if (const auto* child = std::get_if<Module*>(&what)) (*child)->train(on);
}

}  // namespace torus
