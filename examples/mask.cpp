// Draws a mask, counts what it costs, and checks the gradients of attention under it.
#include <CLI/CLI.hpp>
#include <iostream>

#include "mask_flags.h"
#include "mask_report.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app{
      "Draws an attention mask, counts what it costs, and checks the gradients under it.\n"
      "Several masks given together are combined by 'and'. Examples:\n"
      "  mask --grid 5x5 --window 3 --boundary wrap,wrap --show --gradcheck\n"
      "  mask --tokens 1000 --causal --left 64 --png mask.png"};
  std::string png, device = "cpu";
  bool show = false, gradcheck = false;
  const MaskFlags flags(app);
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
  const auto [mask, size] = flags.make();
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
