// What tests of attention measure: distances between results, and the memory of the process.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>

#include "torus/core/tensor.h"

namespace torus {

/// Of the elements that are not infinite.
inline double norm(const Tensor& x) {
  double sum = 0;
  for (double value : x.to_vector<double>())
    if (!std::isinf(value)) sum += value * value;
  return std::sqrt(sum);
}

/// Equal infinities are no distance, others an infinite one.
inline double distance(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  EXPECT_EQ(x.size(), y.size());
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i)
    if (x[i] != y[i]) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

/// A field of /proc/self/status: "VmRSS:" is resident now, "VmHWM:" was at most.
inline int64_t status_kilobytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field)) return std::stoll(line.substr(field.size() + 1));
  return 0;
}

}  // namespace torus
