// A mask that did not exist before, drawn and gradient-checked. Copy this file within its folder, change
// `mine`, and build again: each .cpp here is a program.
#include "flags.h"
#include "mask_report.h"

using namespace torus;

int main(int argc, char** argv) {
  CLI::App app{"Draws a mask that did not exist before, and checks the gradients of attention under it."};
  Device device = cpu;
  add_device(app, device);
  return run_program(app, argc, argv, "new_mask", [&] {
    // Tokens on a 6 x 8 grid whose columns form a circle. Each sees the tokens of its own row that lie an
    // even number of columns away, and all of the first row.
    const std::vector<int64_t> grid{6, 8};
    const Mask mine = Mask::from(
        [](Query q, Key k) {
          const bool same_row = q.coord[0] == k.coord[0];
          return (same_row && (q.coord[1] - k.coord[1]) % 2 == 0) || k.coord[0] == 0;
        },
        {.grid = grid});

    // Masks combine: & (both), | (either), ! (not). Here no token sees itself, except where it is all it has.
    const Mask others = mine & !Mask::from([](Query q, Key k) { return q.token == k.token && q.token >= 8; });

    const MaskSize size{48, 48, grid};
    show_mask(others, size);
    print_mask_costs(others, size);
    return check_mask(others, size, device) ? 0 : 1;
  });
}
