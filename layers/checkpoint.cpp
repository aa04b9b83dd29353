#include "torus/layers/checkpoint.h"

#include <utility>

#include "torus/core/hdf5.h"

namespace torus {

namespace {

const std::string format_name = "torus checkpoint";
constexpr int64_t format_version = 4;
constexpr const char* no_config = "no model configuration";

// Writing and reading name the same members in the same places: `visit` is given each in turn.
template <class Config, class F>
void visit_config(Config& config, int64_t version, F&& visit) {
  visit("vocab_size", config.vocab_size);
  visit("context", config.context);
  visit("layers", config.layers);
  visit("heads", config.heads);
  visit("width", config.width);
  visit("dropout", config.dropout);
  visit("tied_head", config.tied_head);
  visit("bias", config.bias);
  if (version < 2) return;  // which has none of the rest
  visit("kv_heads", config.kv_heads);
  visit("norm", config.norm);
  visit("post_norm", config.post_norm);
  visit("swiglu", config.swiglu);
  visit("rotary", config.rotary);
  if (version < 3) return;
  visit("gelu", config.gelu);
}

template <class State, class F>
void visit_state(State& state, F&& visit) {
  visit("step", state.step);
  visit("loader_position", state.loader_position);
  visit("generator_seed", state.generator.seed);
  visit("generator_position", state.generator.position);
}

// Attributes are i64, double or string.
auto writer(Hdf5File& file, const std::string& group) {
  file.create_group(group);
  return [&file, group](const char* name, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const double&>)
      file.set_attribute(group, name, value);
    else
      file.set_attribute(group, name, static_cast<int64_t>(value));
  };
}

auto reader(const Hdf5File& file, const std::string& group) {
  return [&file, group](const char* name, auto& value) {
    using T = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<T, double>)
      value = file.attribute<double>(group, name);
    else
      value = static_cast<T>(file.attribute<int64_t>(group, name));
  };
}

DType dtype_named(const std::string& wanted, const std::string& path) {
  for (DType dtype : {f64, f32, f16, bf16})
    if (wanted == name(dtype)) return dtype;
  fail(Error::Kind::File, "[checkpoint] ", path, ": no floating dtype is called \"", wanted, "\"");
}

// Another floating dtype is converted.
void check_tensor(const std::string& what, const Tensor& tensor, const Variable& parameter) {
  check(tensor.shape() == parameter.shape() && is_floating(tensor.dtype()), Error::Kind::Value,
        "[checkpoint] expected ", what, " as in the model, ", parameter.dtype(), " ", parameter.shape(),
        ", got ", tensor.dtype(), " ", tensor.shape());
}

// A moment that the optimizer has not, or has.
void check_moment(const std::string& what, const Tensor& saved, const Tensor& own,
                  const Variable& parameter) {
  check(saved.defined() == own.defined(), Error::Kind::Value, "[checkpoint] expected ",
        own.defined() ? "" : "no ", what, ", got ", saved.defined() ? "one" : "none");
  if (saved.defined()) check_tensor(what, saved, parameter);
}

// One entry for each parameter and no other.
template <class Entry>
void check_names(const std::string& what, const std::map<std::string, Entry>& entries,
                 const std::vector<NamedParameter>& parameters) {
  for (const auto& [name, parameter] : parameters)
    check(entries.contains(name), Error::Kind::Value, "[checkpoint] expected ", what, " of ", name,
          ", got none");
  check(entries.size() == parameters.size(), Error::Kind::Value, "[checkpoint] expected ", what, " of ",
        parameters.size(), " parameters, got ", entries.size());
}

void check_config(const Checkpoint& checkpoint, const GPT& model) {
  GPTConfig config = checkpoint.model.value_or(GPTConfig{.layers = 0});
  config.dtype = model.config().dtype;
  check(config == model.config(), Error::Kind::Value,
        "[checkpoint] the model's configuration is not that of the checkpoint");
}

void check_weights(const Checkpoint& checkpoint, const Module& model) {
  const auto parameters = model.named_parameters();
  check_names("the weights", checkpoint.weights, parameters);
  for (const auto& [name, parameter] : parameters) check_tensor(name, checkpoint.weights.at(name), parameter);
}

}  // namespace

Checkpoint make_checkpoint(const GPT& model, const Optimizer& optimizer) {
  Checkpoint result = make_checkpoint(static_cast<const Module&>(model), optimizer);
  result.model = model.config();
  return result;
}

Checkpoint make_checkpoint(const Module& model, const Optimizer& optimizer) {
  Checkpoint result;
  result.generator = default_generator().state();
  for (const auto& [name, parameter] : model.named_parameters()) result.weights[name] = parameter.value();
  result.optimizer_name = optimizer.name();
  const auto& states = optimizer.states();
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& [name, parameter] = optimizer.parameters()[i];
    Optimizer::State& state = result.optimizer[name] = states[i];
    // The master is the weight; one is enough.
    result.weights[name] = state.master.defined() ? std::exchange(state.master, Tensor()) : parameter.value();
  }
  return result;
}

void save_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  write_atomically(path, [&](const std::string& temporary) {
    Hdf5File file = Hdf5File::create(temporary);
    file.set_attribute("/", "format", format_name);
    file.set_attribute("/", "version", format_version);
    if (checkpoint.model) {
      visit_config(*checkpoint.model, format_version, writer(file, "model"));
      file.set_attribute("model", "dtype", std::string(name(checkpoint.model->dtype)));
    } else {
      file.set_attribute("/", no_config, int64_t{1});
    }
    visit_state(checkpoint, writer(file, "state"));
    file.create_group("settings");
    std::vector<std::string> names, values;
    for (const auto& [name, value] : checkpoint.settings) {
      names.push_back(name);
      values.push_back(value);
    }
    file.set_attribute("settings", "names", names);
    file.set_attribute("settings", "values", values);
    file.write("vocabulary",
               Tensor::from(checkpoint.vocabulary, {static_cast<int64_t>(checkpoint.vocabulary.size())}));
    for (const auto& [name, value] : checkpoint.weights) file.write("weights/" + name, value);
    file.create_group("optimizer");
    file.set_attribute("optimizer", "name", checkpoint.optimizer_name);
    for (const auto& [name, state] : checkpoint.optimizer) {
      const std::string group = "optimizer/" + name;
      file.create_group(group);
      if (state.first.defined()) file.write(group + "/first", state.first);
      if (state.second.defined()) file.write(group + "/second", state.second);
      file.set_attribute(group, "steps", state.steps);
    }
    file.create_group("averages");
    for (const auto& [name, average] : checkpoint.averages) file.write("averages/" + name, average);
    file.close();
  });
}

Checkpoint load_checkpoint(const std::string& path) {
  const Hdf5File file = Hdf5File::open(path);
  check(file.has_attribute("/", "format") && file.has_attribute("/", "version") &&
            file.attribute<std::string>("/", "format") == format_name,
        Error::Kind::File, "[checkpoint] ", path, " is an HDF5 file, but not a checkpoint of Torus");
  const auto version = file.attribute<int64_t>("/", "version");
  check(version <= format_version, Error::Kind::File, "[checkpoint] ", path, " has format version ", version,
        "; this program reads up to ", format_version);

  Checkpoint result;
  if (!file.has_attribute("/", no_config)) {  // said, so that a damaged group is not taken for none
    visit_config(result.model.emplace(), version, reader(file, "model"));
    result.model->dtype = dtype_named(file.attribute<std::string>("model", "dtype"), path);
  }
  visit_state(result, reader(file, "state"));
  const auto names = file.attribute<std::vector<std::string>>("settings", "names");
  const auto values = file.attribute<std::vector<std::string>>("settings", "values");
  check(names.size() == values.size(), Error::Kind::File, "[checkpoint] ", path, " has ", names.size(),
        " names of settings, but ", values.size(), " values");
  for (size_t i = 0; i < names.size(); ++i) result.settings[names[i]] = values[i];
  result.vocabulary = file.read("vocabulary").to_vector<int64_t>();
  for (const auto& entry : file.list("weights"))
    result.weights[entry.name] = file.read("weights/" + entry.name);
  if (version >= 2) result.optimizer_name = file.attribute<std::string>("optimizer", "name");
  for (const auto& entry : file.list("optimizer")) {
    const std::string group = "optimizer/" + entry.name;
    const auto moment = [&](const std::string& name) {
      return file.contains(group + "/" + name) ? file.read(group + "/" + name) : Tensor();
    };
    result.optimizer[entry.name] = {moment("first"), moment("second"),
                                    file.attribute<int64_t>(group, "steps"), Tensor()};
  }
  if (version < 4) return result;
  for (const auto& entry : file.list("averages"))
    result.averages[entry.name] = file.read("averages/" + entry.name);
  return result;
}

void restore(const Checkpoint& checkpoint, GPT& model) {
  check_config(checkpoint, model);
  restore(checkpoint, static_cast<Module&>(model));
}

void restore(const Checkpoint& checkpoint, Module& model) {
  check_weights(checkpoint, model);
  for (auto& [name, parameter] : model.named_parameters())
    parameter.mutable_value().copy_(checkpoint.weights.at(name));
}

void restore(const Checkpoint& checkpoint, GPT& model, Optimizer& optimizer) {
  check_config(checkpoint, model);
  restore(checkpoint, static_cast<Module&>(model), optimizer);
}

void restore(const Checkpoint& checkpoint, Module& model, Optimizer& optimizer) {
  check(checkpoint.optimizer_name == optimizer.name(), Error::Kind::Value,
        "[checkpoint] expected the state of ", optimizer.name(), ", got that of ", checkpoint.optimizer_name);
  check_names("the optimizer's state", checkpoint.optimizer, optimizer.parameters());
  const auto& states = optimizer.states();
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& [name, parameter] = optimizer.parameters()[i];
    const Optimizer::State &state = checkpoint.optimizer.at(name), &own = states[i];
    check_moment("the first moment of " + name, state.first, own.first, parameter);
    check_moment("the second moment of " + name, state.second, own.second, parameter);
    check(state.steps >= 0, Error::Kind::Value, "[checkpoint] expected steps of at least 0 for ", name,
          ", got ", state.steps);
  }
  restore(checkpoint, model);
  std::vector<Optimizer::State> restored;
  for (auto [name, parameter] : optimizer.parameters()) {
    const Tensor& weight = checkpoint.weights.at(name);
    parameter.mutable_value().copy_(weight);
    restored.push_back(checkpoint.optimizer.at(name));
    restored.back().master = weight;
  }
  optimizer.set_states(restored);
  default_generator().set_state(checkpoint.generator);
}

}  // namespace torus
