// Draws a mask, counts what it costs, and checks the gradients of attention under it.
#include "flags.h"
#include "mask_flags.h"
#include "mask_report.h"

using namespace torus;

int main(int argc, char** argv) {
  CLI::App app{
      "Draws an attention mask, counts what it costs, and checks the gradients under it.\n"
      "Several masks given together are combined by 'and'. Examples:\n"
      "  mask --grid 5x5 --window 3 --boundary wrap,wrap --show --gradcheck\n"
      "  mask --tokens 1000 --causal --left 64 --png mask.png"};
  std::string png;
  Device device = cpu;
  bool show = false, gradcheck = false;
  const MaskFlags flags(app);
  app.add_flag("--show", show, "draw it in the terminal: a row for each query, a column for each key");
  app.add_option("--png", png, "draw it into a PNG file");
  app.add_flag("--gradcheck", gradcheck,
               "compare the fused kernels with finite differences and the reference");
  add_device(app, device, "cpu (default) or cuda: whose kernels are compared");
  return run_program(app, argc, argv, "mask", [&] {
    const auto [mask, size] = flags.make();
    print_mask_costs(mask, size);
    if (show) show_mask(mask, size);
    if (!png.empty()) draw_mask(mask, size, png);
    return gradcheck && !check_mask(mask, size, device) ? 1 : 0;
  });
}
