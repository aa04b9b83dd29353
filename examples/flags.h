// Flags of programs, what their values may be, and those that a checkpoint keeps.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "torus/core/device.h"
#include "torus/core/error.h"
#include "torus/core/hdf5.h"
#include "training.h"

/// A rule for the value of a flag: a finite number for which `holds` is true.
inline CLI::Validator number_rule(const std::string& what, bool (*holds)(double)) {
  const auto complaint = [=](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool good = end != text.c_str() && *end == '\0' && std::isfinite(value) && holds(value);
    return good ? std::string()
                : "expected " + what + (std::isinf(value) ? ", finite" : "") + ", got " + text;
  };
  return CLI::Validator(complaint, "");
}
inline const CLI::Validator above_0 = number_rule("a number above 0", [](double x) { return x > 0; });
inline const CLI::Validator at_least_0 =
    number_rule("a number of at least 0", [](double x) { return x >= 0; });
inline const CLI::Validator from_0_to_1 =
    number_rule("a number from 0 to 1", [](double x) { return x >= 0 && x <= 1; });

/// --device, of a program that computes.
inline void add_device(CLI::App& app, torus::Device& device,
                       const std::string& help = "cpu (default) or cuda") {
  const auto set = [&device](const std::string& name) { device = name == "cuda" ? torus::cuda : torus::cpu; };
  app.add_option_function<std::string>("--device", set, help)->check(CLI::IsMember({"cpu", "cuda"}));
}

using Settings = std::map<std::string, std::string>;

/// A flag whose value decides what is trained and how: a preset or a checkpoint may give it, and a run that
/// resumes shares it with the one that saved.
struct Flag {
  std::string name, help;
  std::variant<std::string*, int64_t*, double*> value;
  bool may_change = false;  // where a run resumes
  CLI::Option* option = nullptr;

  void add_to(CLI::App& app) {
    option = std::visit([&](auto* into) { return app.add_option("--" + name, *into, help); }, value);
  }
  bool given() const { return option->count() > 0; }
  void set(const std::string& text) {
    option->add_result(text);
    option->run_callback();
  }
  std::string text() const {
    if (const auto* text = std::get_if<std::string*>(&value)) return **text;
    if (const auto* count = std::get_if<int64_t*>(&value)) return std::to_string(**count);
    return to_text(*std::get<double*>(value));
  }
};

/// Flags that were not given are as in the checkpoint at `path`; those that were must agree with it, unless
/// they may change.
inline void take_settings(std::vector<Flag>& flags, const Settings& saved, const std::string& path,
                          const std::string& program) {
  using torus::Error;
  for (Flag& flag : flags) {
    const auto found = saved.find(flag.name);
    torus::check(found != saved.end(), Error::Kind::File, path, " does not say its --", flag.name, ": ",
                 program, " did not write it");
    if (!flag.given() && flag.text() != found->second) flag.set(found->second);
    torus::check(flag.may_change || flag.text() == found->second, Error::Kind::Value, "--", flag.name, " ",
                 flag.text(), " is at odds with ", path, ", which was made with ",
                 found->second.empty() ? "the default" : found->second);
  }
}

/// A run of two minutes must not end with the news that what it made cannot be saved.
inline void check_can_save(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const bool replaces = std::filesystem::exists(path);
  torus::check(!std::filesystem::is_directory(path) && access(folder.c_str(), W_OK) == 0 &&
                   (!replaces || access(path.c_str(), W_OK) == 0),
               torus::Error::Kind::File, "cannot save to ", path.string(),
               ": it is a folder, or protected, or not in a folder that can be written");
}

/// A program's main: parses the flags and runs. What is wrong is one line, "name: ...", and 1 the status.
template <class Run>
int run_program(CLI::App& app, int argc, char** argv, const std::string& name, const Run& run) {
  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::cerr << name << ": " << torus::printable(error.what()) << "\n";
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << name << ": " << torus::printable(error.what()) << "\n";
  }
  return 1;
}
