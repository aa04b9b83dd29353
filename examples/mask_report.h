// What a mask allows, what it costs and whether its gradients are right: for `mask` and `new_mask`.
#pragma once

#include <torus/torus.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "mask_flags.h"
#include "torus/ops/attention/map.h"
#include "write_png.h"

/// One character a pair: rows are queries, columns keys. With a grid of two axes, also the windows of three
/// queries.
inline void show_mask(const torus::Mask& mask, const MaskSize& size) {
  if (size.queries > 100 || size.keys > 160) {
    std::printf("%lld x %lld is too large to draw here; --png FILE draws any\n",
                static_cast<long long>(size.queries), static_cast<long long>(size.keys));
    return;
  }
  for (int64_t q = 0; q < size.queries; ++q) {
    std::string row;
    for (int64_t k = 0; k < size.keys; ++k) row += mask.allows(q, k, size.queries, size.keys) ? '#' : '.';
    std::printf("%4lld  %s\n", static_cast<long long>(q), row.c_str());
  }
  if (size.grid.size() != 2 || size.queries != size.keys) return;
  const int64_t rows = size.grid[0], columns = size.grid[1];
  for (int64_t q : {int64_t{0}, rows / 2 * columns + columns / 2, rows * columns - 1}) {
    std::printf("\nquery (%lld, %lld)\n", static_cast<long long>(q / columns),
                static_cast<long long>(q % columns));
    for (int64_t r = 0; r < rows; ++r) {
      std::string row = "      ";
      for (int64_t c = 0; c < columns; ++c)
        row += r * columns + c == q                                       ? '@'
               : mask.allows(q, r * columns + c, size.queries, size.keys) ? '#'
                                                                          : '.';
      std::printf("%s\n", row.c_str());
    }
  }
}

/// One pixel a pair, or one a block of pairs, grey by how many of them are allowed, where there are more than
/// 2048.
inline void draw_mask(const torus::Mask& mask, const MaskSize& size, const std::string& path) {
  const int64_t step = std::max<int64_t>(1, (std::max(size.queries, size.keys) + 2047) / 2048);
  const int64_t zoom = std::max<int64_t>(1, 512 / std::max(size.queries, size.keys));
  const int64_t height = (size.queries + step - 1) / step * zoom,
                width = (size.keys + step - 1) / step * zoom;
  const int64_t columns = width / zoom;
  std::vector<int64_t> allowed(static_cast<size_t>(height / zoom * columns), 0);
  torus::detail::for_each_visit(
      *mask.rule().map({.queries = size.queries, .keys = size.keys}), torus::detail::Side::query,
      size.queries, [&](std::span<const int64_t> owners, int64_t key, int64_t count, uint64_t word) {
        // Owners of one row of pixels together: intervals may be long.
        for (size_t i = 0; i < owners.size();) {
          const int64_t row = owners[i] / step;
          int64_t seeing = 0;
          for (; i < owners.size() && owners[i] / step == row; ++i) seeing += word >> i & 1;
          if (seeing == 0) continue;
          for (int64_t k = key, next; k < key + count; k = next) {
            next = std::min(key + count, (k / step + 1) * step);
            allowed[static_cast<size_t>(row * columns + k / step)] += seeing * (next - k);
          }
        }
      });
  std::vector<unsigned char> grey;
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) {
      const int64_t row = y / zoom, column = x / zoom,
                    pairs =
                        std::min(step, size.queries - row * step) * std::min(step, size.keys - column * step);
      grey.push_back(static_cast<unsigned char>(
          255 - 255 * allowed[static_cast<size_t>(row * columns + column)] / pairs));
    }
  write_png(path, grey, static_cast<int>(width), static_cast<int>(height));
  std::printf("wrote %s: rows are queries, columns keys, black is allowed\n", path.c_str());
}

/// Keys a query, and what the kernels visit.
inline void print_mask_costs(const torus::Mask& mask, const MaskSize& size) {
  const auto costs = torus::mask_costs(mask, size.queries, size.keys);
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  std::printf("keys a query       %lld to %lld\n", number(costs.fewest_keys), number(costs.most_keys));
  std::printf("scores needed      %lld\n", number(costs.needed));
  std::printf(
      "scores visited     %lld, %.2f times the needed\n", number(costs.visited),
      costs.needed > 0 ? static_cast<double>(costs.visited) / static_cast<double>(costs.needed) : 0.0);
  std::printf("share of all pairs %.4f\n", static_cast<double>(costs.visited) /
                                               static_cast<double>(size.queries) /
                                               static_cast<double>(size.keys));
  std::printf("visits             %lld intervals, %lld runs, %lld gathers\n", number(costs.intervals),
              number(costs.runs), number(costs.gathers));
  std::printf("distinct atoms     %lld\n", number(costs.atoms));
  std::printf("bytes of the map   %lld\n", number(costs.bytes));
}

/// The fused kernels of a device in double against finite differences and against the composed reference: the
/// output, lse and all gradients of `batch` elements and two heads. Prints one table; returns whether all is
/// well.
inline bool check_mask(const torus::Mask& mask, const MaskSize& size, torus::Device device = torus::cpu,
                       int64_t batch = 2) {
  using namespace torus;
  const int64_t heads = 2, width = 3;
  Generator generator(1);
  const auto make = [&](int64_t tokens) {
    return randn({batch, heads, tokens, width}, 0, 1, f64, generator).to(device);
  };
  const std::vector<Tensor> inputs{make(size.queries), make(size.keys), make(size.keys)};
  const Tensor d_out = make(size.queries),
               d_lse = randn({batch, heads, size.queries}, 0, 1, f64, generator).to(device);
  const auto run = [&](Backend backend) {
    Tape tape;
    std::vector<Variable> x;
    for (const Tensor& input : inputs) x.emplace_back(input, true);
    const auto [out, lse] = attention(x[0], x[1], x[2], {.mask = mask, .backend = backend});
    tape.backward({out, lse}, {d_out, d_lse});
    return std::vector<Tensor>{out.value(), lse.value(), x[0].grad(), x[1].grad(), x[2].grad()};
  };
  const auto distance = [](const Tensor& x, const Tensor& y) {
    const auto a = x.to_vector<double>(), b = y.to_vector<double>();
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i]) sum += (a[i] - b[i]) * (a[i] - b[i]);  // lse of a row without keys is -inf in both
    return std::sqrt(sum);
  };

  bool good = true;
  std::printf("%-24s %12s %10s\n", "check, in double", "error", "");
  const auto row = [&](const std::string& what, double error, bool ok) {
    good &= ok;
    std::printf("%-24s %12.2e %10s\n", what.c_str(), error, ok ? "ok" : "WRONG");
  };
  if (batch * size.queries * size.keys <= 4096 * 4096) {
    const auto fused = run(Backend::automatic), composed = run(Backend::reference);
    const char* names[] = {"output", "lse", "gradient of q", "gradient of k", "gradient of v"};
    for (size_t i = 0; i < 5; ++i) {
      // Relative, but for a gradient that is truly zero, as with one key a query.
      double scale = 1e-6;
      for (double value : composed[i].to_vector<double>())
        if (std::isfinite(value)) scale += value * value;
      scale = std::sqrt(scale);
      const double error = distance(fused[i], composed[i]) / scale;
      row(std::string(names[i]) + ", reference", error, error <= 1e-10);
    }
  } else {
    std::printf("too large for the reference, which holds all pairs\n");
  }
  const bool full_jacobian = batch * (size.queries + 2 * size.keys) <= 384;
  const auto report = gradcheck(
      [&](const std::vector<Variable>& x) {
        const auto [out, lse] = attention(x[0], x[1], x[2], {.mask = mask});
        return std::vector<Variable>{out, lse};
      },
      inputs, {.mode = full_jacobian ? GradcheckOptions::Mode::full : GradcheckOptions::Mode::projection});
  row(full_jacobian ? "finite differences, all" : "finite differences, sum",
      std::abs(report.analytic - report.numeric), report.passed);
  if (!report) std::printf("%s\n", (std::ostringstream() << report).str().c_str());
  std::printf("%lld derivatives compared\n", static_cast<long long>(report.checked));
  return good;
}
