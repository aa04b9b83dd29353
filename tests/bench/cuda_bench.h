// What the benchmarks of CUDA devices share.
#pragma once

#include <torus/torus.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace torus::bench {

/// The least mean of `rounds` of `runs` calls of f, in microseconds, by the clock of the host.
template <class F>
double least_time(int rounds, int runs, F&& f) {
  using Clock = std::chrono::steady_clock;
  double least = 1e30;
  for (int round = 0; round < rounds; ++round) {
    synchronize(cuda);
    const auto start = Clock::now();
    for (int i = 0; i < runs; ++i) f();
    synchronize(cuda);
    least = std::min(least, std::chrono::duration<double, std::micro>(Clock::now() - start).count() / runs);
  }
  return least;
}

/// Measures the cases whose names are arguments of the program, or all; what main returns.
template <class Cases, class Measure>
int run_cases(int argc, char** argv, const Cases& cases, const Measure& measure) {
  if (!cuda_available()) {
    std::puts("no CUDA device");
    return 0;
  }
  for (const auto& c : cases)
    if (argc < 2 || std::find(argv + 1, argv + argc, c.name) != argv + argc) measure(c);
  return 0;
}

}  // namespace torus::bench
