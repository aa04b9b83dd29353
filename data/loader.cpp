#include "torus/data/loader.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace torus {

struct Prefetcher::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Batch> ready;
  std::exception_ptr error;  // what ended the thread; the batches made before it are handed out first
  bool stop = false;
  std::thread thread;

  void produce(const std::function<Batch(int64_t)>& source, int64_t index, size_t depth) {
    try {
      for (;; ++index) {
        {
          std::unique_lock lock(mutex);
          changed.wait(lock, [&] { return stop || ready.size() < depth; });
          if (stop) return;
        }
        Batch batch = source(index);
        const std::lock_guard lock(mutex);
        ready.push_back(std::move(batch));
        changed.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
      changed.notify_all();
    }
  }
};

Prefetcher::Prefetcher(std::function<Batch(int64_t)> source, int64_t first, int64_t depth)
    : shared_(std::make_unique<Shared>()), position_(first) {
  check(first >= 0 && depth >= 1, Error::Kind::Value, "[prefetcher] expected first >= 0 and depth >= 1, got ",
        first, " and ", depth);
  shared_->thread = std::thread([shared = shared_.get(), source = std::move(source), first, depth] {
    shared->produce(source, first, static_cast<size_t>(depth));
  });
}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->changed.notify_all();
  shared_->thread.join();
}

Batch Prefetcher::next() {
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return !shared_->ready.empty() || shared_->error; });
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (shared_->ready.empty()) std::rethrow_exception(shared_->error);
  Batch batch = std::move(shared_->ready.front());
  shared_->ready.pop_front();
  shared_->changed.notify_all();
  ++position_;
  return batch;
}

}  // namespace torus
