// Draws a mask, counts what it costs, and checks the gradients of attention under it.
#include <CLI/CLI.hpp>
#include <iostream>
#include <numeric>

#include "mask_report.h"

namespace {

std::vector<int64_t> numbers(const std::string& text, char separator, const char* flag) {
  std::vector<int64_t> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, separator);) {
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

std::vector<torus::Boundary> boundaries(const std::string& text) {
  const std::map<std::string, torus::Boundary> names{{"wrap", torus::Boundary::wrap},
                                                     {"shift", torus::Boundary::shift},
                                                     {"shrink", torus::Boundary::shrink},
                                                     {"causal", torus::Boundary::causal},
                                                     {"valid", torus::Boundary::valid}};
  std::vector<torus::Boundary> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto found = names.find(part);
    torus::check(found != names.end(), torus::Error::Kind::Value,
                 "--boundary: expected wrap, shift, shrink, causal or valid, got ", part);
    result.push_back(found->second);
  }
  return result;
}

int64_t product(const std::vector<int64_t>& sides) {
  return std::accumulate(sides.begin(), sides.end(), int64_t{1}, std::multiplies<>());
}

int run(int argc, char** argv) {
  CLI::App app{
      "Draws an attention mask, counts what it costs, and checks the gradients under it.\n"
      "Several masks given together are combined by 'and'. Examples:\n"
      "  mask --grid 5x5 --window 3 --boundary wrap,wrap --show --gradcheck\n"
      "  mask --tokens 1000 --causal --left 64 --png mask.png"};
  std::string grid, window = "3", dilation = "1", boundary = "shift", documents, png, device = "cpu";
  int64_t tokens = 0, left = -1, right = -1, prefix = -1;
  bool causal = false, show = false, gradcheck = false;
  app.add_option("--grid", grid, "sides of a grid, such as 20x20x16: a window around each token");
  app.add_option("--window", window, "keys a window, one number or one an axis: 5 or 5,5,3")
      ->capture_default_str();
  app.add_option("--dilation", dilation, "step between the keys of a window, one number or one an axis")
      ->capture_default_str();
  app.add_option("--boundary", boundary, "wrap, shift, shrink, causal or valid, one or one an axis")
      ->capture_default_str();
  app.add_option("--tokens", tokens, "length of a sequence, if there is no grid");
  app.add_flag("--causal", causal, "keys up to the query");
  app.add_option("--left", left, "a sliding window: keys before the query");
  app.add_option("--right", right, "a sliding window: keys after the query");
  app.add_option("--documents", documents, "lengths of packed documents, such as 100,20,8");
  app.add_option("--prefix", prefix, "the first keys are seen by all, the others causally");
  app.add_flag("--show", show, "draw it in the terminal: a row for each query, a column for each key");
  app.add_option("--png", png, "draw it into a PNG file");
  app.add_flag("--gradcheck", gradcheck,
               "compare the fused kernels with finite differences and the reference");
  app.add_option("--device", device, "cpu or cuda: whose kernels are compared")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    torus::fail(torus::Error::Kind::Value, "mask: ", error.what());
  }

  using namespace torus;
  std::vector<Mask> masks;
  MaskSize size{tokens, tokens, {}};
  if (!grid.empty()) {
    NeighborhoodOptions o{.grid = numbers(grid, 'x', "--grid"),
                          .window = numbers(window, ',', "--window"),
                          .dilation = numbers(dilation, ',', "--dilation"),
                          .boundary = boundaries(boundary)};
    o.key_grid = o.grid;
    const auto entry = [](const auto& list, size_t axis) {
      return list.size() == 1 ? list[0] : list.at(axis);
    };
    const size_t axes = o.grid.size();
    if (std::max({o.window.size(), o.dilation.size(), o.boundary.size()}) <= axes)
      for (size_t a = 0; a < axes; ++a)
        if (entry(o.boundary, a) == Boundary::valid)
          o.key_grid[a] += (entry(o.window, a) - 1) * entry(o.dilation, a);
    masks.push_back(neighborhood(o));
    size = {product(o.grid), product(o.key_grid), o.key_grid};
  }
  if (causal) masks.push_back(torus::causal());
  if (left >= 0 || right >= 0)
    masks.push_back(sliding_window(std::max<int64_t>(left, 0), std::max<int64_t>(right, 0)));
  if (prefix >= 0) masks.push_back(torus::prefix(prefix));
  if (!documents.empty()) {
    const auto lengths = numbers(documents, ',', "--documents");
    masks.push_back(document(lengths));
    if (size.queries == 0)
      size.queries = size.keys = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  }
  check(size.queries > 0, Error::Kind::Value,
        "mask: expected --grid, --tokens or --documents (--help lists all)");
  Mask mask = masks.empty() ? full() : masks[0];
  for (size_t i = 1; i < masks.size(); ++i) mask = mask & masks[i];

  print_mask_costs(mask, size);
  if (show) show_mask(mask, size);
  if (!png.empty()) draw_mask(mask, size, png);
  return gradcheck && !check_mask(mask, size, device == "cuda" ? cuda : cpu) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
