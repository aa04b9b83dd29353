#include "torus/data/phantom.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "torus/core/parallel.h"
#include "torus/core/random.h"

namespace torus {

namespace {

using Point = std::array<double, 3>;  // z, y, x; -1 and 1 are the ends of the field of view

struct Ellipsoid {
  Point center, semiaxes;
  double angle;      // in the plane of y and x
  double intensity;  // what it sets (layers of the head) or adds (what lies in the brain)
  bool adds;

  // 1 inside and 0 outside; at the edge in between, over about a voxel.
  double share(const Point& at, double voxels) const {
    const double c = std::cos(angle), s = std::sin(angle);
    const double z = at[0] - center[0], y = at[1] - center[1], x = at[2] - center[2];
    const Point turned{z, c * y + s * x, c * x - s * y};
    double r = 0;
    for (size_t k = 0; k < 3; ++k) r += turned[k] * turned[k] / (semiaxes[k] * semiaxes[k]);
    return std::clamp(0.5 + (1 - std::sqrt(r)) * semiaxes[1] * voxels, 0., 1.);
  }
};

struct Wave {
  Point frequency;
  double phase, amplitude;
};

}  // namespace

Tensor phantom(const Shape& shape, uint64_t seed) {
  check(shape.dim() == 3 && shape.numel() > 0, Error::Kind::Shape,
        "[phantom] expected a shape [z, y, x], got ", shape);
  Generator random(seed);
  const auto between = [&](double low, double high) { return low + (high - low) * random.uniform(); };
  constexpr double pi = std::numbers::pi;

  const Point center{between(-0.1, 0.1), between(-0.03, 0.03), between(-0.03, 0.03)};
  const double height = between(0.78, 0.86), width = between(0.66, 0.76), tilt = between(-0.1, 0.1);
  std::vector<Ellipsoid> parts;
  const auto layer = [&](double size, double intensity) {
    parts.push_back({center, {1.3 * size, height * size, width * size}, tilt, intensity, false});
  };
  layer(1, between(0.75, 0.95));       // scalp
  layer(0.93, between(0.04, 0.1));     // skull
  layer(0.87, between(0.4, 0.5));      // grey matter
  layer(0.78, between(0.55, 0.65));    // white matter
  for (const double side : {-1., 1.})  // ventricles
    parts.push_back({{center[0], center[1] + between(-0.1, 0), center[2] + side * between(0.1, 0.16)},
                     {0.5, between(0.2, 0.3), between(0.05, 0.09)},
                     -side * between(0.1, 0.4),
                     between(-0.45, -0.3),
                     true});
  for (int i = 0; i < 12; ++i) {
    const double r = 0.7 * std::sqrt(random.uniform()), angle = between(0, 2 * pi);
    parts.push_back({{between(-0.9, 0.9), center[1] + r * height * std::sin(angle),
                      center[2] + r * width * std::cos(angle)},
                     {between(0.2, 0.6), between(0.03, 0.14), between(0.03, 0.14)},
                     between(0, pi),
                     between(-0.2, 0.3),
                     true});
  }
  std::vector<Wave> waves;
  for (int i = 0; i < 16; ++i) {
    Wave wave{{}, between(0, 2 * pi), between(0.005, 0.02)};
    for (double& f : wave.frequency) f = between(-30, 30);  // radians a half field of view
    waves.push_back(wave);
  }
  const double offset = between(-pi, pi);
  Point slope, bend;
  for (size_t k = 0; k < 3; ++k) slope[k] = between(-1, 1), bend[k] = between(-0.7, 0.7);

  const int64_t slices = shape[0], rows = shape[1], columns = shape[2];
  const double voxels = 0.5 * static_cast<double>(std::min(rows, columns));  // in a length of 1
  Tensor result = Tensor::empty({slices, rows, columns, 2});
  float* out = result.mutable_data<float>();
  const auto place = [](int64_t i, int64_t n) {
    return (2 * static_cast<double>(i) + 1) / static_cast<double>(n) - 1;
  };
  parallel_for(0, slices * rows, 8, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t x = 0; x < columns; ++x) {
        const Point at{place(row / rows, slices), place(row % rows, rows), place(x, columns)};
        double value = 0, inside = 0;  // the share of white matter
        for (size_t p = 0; p < parts.size(); ++p) {
          const double share = parts[p].share(at, voxels);
          if (parts[p].adds)
            value += share * inside * parts[p].intensity;
          else
            value += share * (parts[p].intensity - value), inside = share;
        }
        double texture = 1, phase = offset;
        for (const Wave& wave : waves)
          texture += wave.amplitude * std::cos(wave.phase + wave.frequency[0] * at[0] +
                                               wave.frequency[1] * at[1] + wave.frequency[2] * at[2]);
        for (size_t k = 0; k < 3; ++k) phase += slope[k] * at[k] + bend[k] * at[k] * at[k];
        value = std::max(0., value * texture);
        float* voxel = out + 2 * (row * columns + x);
        voxel[0] = static_cast<float>(value * std::cos(phase));
        voxel[1] = static_cast<float>(value * std::sin(phase));
      }
  });
  return result;
}

}  // namespace torus
