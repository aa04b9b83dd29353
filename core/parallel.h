// Loops over threads.
#pragma once

#include <cstdint>
#include <functional>

namespace torus {

/// Threads that loops use: OMP_NUM_THREADS or the number of processors at first.
int num_threads();
void set_num_threads(int count);

/// Calls f(first, last) on parts of [begin, end), each at least `grain` long, on several threads. The parts
/// depend on the thread count, so f must not carry a sum from one index to the next if bits matter. An
/// exception in any part is rethrown here, after all parts ended. Nested calls run on the calling thread.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& f);

/// Calls f(i) for each i in [0, count): threads take the indices in ascending order, one at a time.
void parallel_tasks(int64_t count, const std::function<void(int64_t)>& f);

}  // namespace torus
