// The flags that describe a mask, for `mask` and `profile_attention`.
#pragma once

#include <torus/torus.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "flags.h"

/// The parts between separators, of which there may be one more than separators.
inline std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text + separator);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

/// Numbers between separators. Throws Error{Value} naming the flag.
inline std::vector<int64_t> numbers(const std::string& text, char separator, const char* flag) {
  std::vector<int64_t> result;
  for (const std::string& part : parts_of(text, separator)) {
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(part, &used);
    } catch (const std::exception&) {
    }
    torus::check(used > 0 && used == part.size(), torus::Error::Kind::Value, flag,
                 ": expected numbers separated by '", separator, "', got ", text);
    result.push_back(value);
  }
  return result;
}

inline std::vector<torus::Boundary> boundaries(const std::string& text) {
  const std::map<std::string, torus::Boundary> names{{"wrap", torus::Boundary::wrap},
                                                     {"shift", torus::Boundary::shift},
                                                     {"shrink", torus::Boundary::shrink},
                                                     {"causal", torus::Boundary::causal},
                                                     {"valid", torus::Boundary::valid}};
  std::vector<torus::Boundary> result;
  for (const std::string& part : parts_of(text, ',')) {
    const auto found = names.find(part);
    torus::check(found != names.end(), torus::Error::Kind::Value,
                 "--boundary: expected wrap, shift, shrink, causal or valid, between commas, got '", text,
                 "'");
    result.push_back(found->second);
  }
  return result;
}

struct MaskSize {
  int64_t queries, keys;
  std::vector<int64_t> grid = {};  // of the keys, to draw windows on; empty: none
};

/// Masks given together are combined by `&`.
class MaskFlags {
 public:
  /// `tokens`: how many there are where no flag says it; 0: then one must.
  explicit MaskFlags(CLI::App& app, int64_t tokens = 0) : default_tokens_(tokens) {
    CLI::Option* const grid = grid_option_ =
        app.add_option("--grid", grid_, "sides of a grid, such as 20x20x16: a window around each token");
    app.add_option("--window", window_, "keys a window, one number or one an axis: 5 or 5,5,3")
        ->capture_default_str()
        ->needs(grid);
    app.add_option("--dilation", dilation_, "step between the keys of a window, one number or one an axis")
        ->capture_default_str()
        ->needs(grid);
    app.add_option("--boundary", boundary_, "wrap, shift, shrink, causal or valid, one or one an axis")
        ->capture_default_str()
        ->needs(grid);
    app.add_option("--tokens", tokens_, "length of a sequence, if there is no grid")
        ->check(above_0)
        ->excludes(grid);
    app.add_flag("--causal", causal_, "keys up to the query");
    app.add_option("--left", left_, "a sliding window: keys before the query")->check(at_least_0);
    app.add_option("--right", right_, "a sliding window: keys after the query")->check(at_least_0);
    documents_option_ =
        app.add_option("--documents", documents_, "lengths of packed documents, such as 100,20,8");
    app.add_option("--prefix", prefix_, "the first keys are seen by all, the others causally")
        ->check(at_least_0);
  }

  struct Made {
    torus::Mask mask;
    MaskSize size;
  };
  Made make() const {
    using namespace torus;
    std::vector<Mask> masks;
    MaskSize size{tokens_, tokens_, {}};
    if (grid_option_->count() > 0) {
      NeighborhoodOptions o{.grid = numbers(grid_, 'x', "--grid"),
                            .window = numbers(window_, ',', "--window"),
                            .dilation = numbers(dilation_, ',', "--dilation"),
                            .boundary = boundaries(boundary_)};
      const size_t axes = o.grid.size();
      for (const auto& [flag, count] : {std::pair("--window", o.window.size()),
                                        {"--dilation", o.dilation.size()},
                                        {"--boundary", o.boundary.size()}})
        check(count == 1 || count == axes, Error::Kind::Value, flag, ": expected 1 or ", axes,
              " entries, one an axis of the grid, got ", count);
      o.key_grid = o.grid;
      const auto entry = [](const auto& list, size_t axis) { return list[list.size() == 1 ? 0 : axis]; };
      for (size_t a = 0; a < axes; ++a) {
        const int64_t w = entry(o.window, a), d = entry(o.dilation, a), most = detail::max_tokens;
        if (entry(o.boundary, a) != Boundary::valid) continue;
        check(w <= most && d <= most && o.grid[a] <= most, Error::Kind::Value, "--grid: an axis has at most ",
              most, " tokens");
        o.key_grid[a] += (w - 1) * d;
      }
      masks.push_back(neighborhood(o));
      size = {product(o.grid), product(o.key_grid), o.key_grid};
    }
    if (causal_) masks.push_back(torus::causal());
    if (left_ >= 0 || right_ >= 0)
      masks.push_back(sliding_window(std::max<int64_t>(left_, 0), std::max<int64_t>(right_, 0)));
    if (prefix_ >= 0) masks.push_back(torus::prefix(prefix_));
    if (documents_option_->count() > 0) {
      const auto lengths = numbers(documents_, ',', "--documents");
      masks.push_back(document(lengths));
      if (size.queries == 0)
        size.queries = size.keys = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    }
    if (size.queries == 0) size.queries = size.keys = default_tokens_;
    check(size.queries > 0, Error::Kind::Value,
          "expected --grid, --tokens or --documents (--help lists all)");
    Mask mask = masks.empty() ? full() : masks[0];
    for (size_t i = 1; i < masks.size(); ++i) mask = mask & masks[i];
    return {mask, size};
  }

 private:
  static int64_t product(const std::vector<int64_t>& sides) {
    return std::accumulate(sides.begin(), sides.end(), int64_t{1}, std::multiplies<>());
  }

  CLI::Option *grid_option_, *documents_option_;
  std::string grid_, window_ = "3", dilation_ = "1", boundary_ = "shift", documents_;
  int64_t default_tokens_, tokens_ = 0, left_ = -1, right_ = -1, prefix_ = -1;
  bool causal_ = false;
};
