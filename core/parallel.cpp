#include "torus/core/parallel.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "torus/core/error.h"

namespace torus {

namespace {
std::atomic<int> chosen_threads{0};

// The first exception of a parallel region, kept until the region has ended.
class FirstError {
 public:
  template <class F>
  void guard(F&& f) {
    try {
      f();
    } catch (...) {
      if (!seen_.exchange(true)) error_ = std::current_exception();
    }
  }
  bool seen() const { return seen_.load(std::memory_order_relaxed); }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> seen_{false};
  std::exception_ptr error_;
};
}  // namespace

int num_threads() {
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  return chosen > 0 ? chosen : omp_get_max_threads();
}

void set_num_threads(int count) {
  check(count >= 1, Error::Kind::Value, "[set_num_threads] expected at least 1, got ", count);
  chosen_threads = count;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
  const int64_t length = end - begin;
  if (length <= 0) return;
  const auto parts = std::min<int64_t>(num_threads(), length / std::max<int64_t>(grain, 1));
  if (parts <= 1 || omp_in_parallel()) return f(begin, end);
  FirstError error;
#pragma omp parallel num_threads(static_cast<int>(parts))
  {
    // The runtime may give fewer threads than asked for.
    const int64_t part = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t first = begin + length * part / count, last = begin + length * (part + 1) / count;
    if (first < last) error.guard([&] { f(first, last); });
  }
  error.rethrow();
}

void parallel_tasks(int64_t count, const std::function<void(int64_t)>& f) {
  const auto threads = std::min<int64_t>(num_threads(), count);
  if (threads <= 1 || omp_in_parallel()) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  FirstError error;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(threads))
  error.guard([&] {
    for (int64_t i; !error.seen() && (i = next.fetch_add(1)) < count;) f(i);
  });
  error.rethrow();
}

}  // namespace torus
