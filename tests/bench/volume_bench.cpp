// Seconds for COUNT random and as many sequential slices of a dataset, and the share of its time that a loop
// with steps of 5 ms waits for batches of 4 random slices: volume_bench FILE DATASET COUNT. For
// compare_h5py.py.
#include <torus/torus.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

int main(int argc, char** argv) {
  using namespace torus;
  using Clock = std::chrono::steady_clock;
  if (argc != 4) {
    std::fprintf(stderr, "usage: volume_bench FILE DATASET COUNT\n");
    return 1;
  }
  const int64_t count = std::atoll(argv[3]);
  const auto since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  for (const bool random : {true, false}) {
    const Volume volume = open_volume(argv[1], {.dataset = argv[2]});
    Shape first = volume.shape(), box = first;
    box[0] = 1;
    Tensor into = Tensor::empty(box);
    std::fill_n(&first[0], first.dim(), 0);
    Generator generator(1);
    const auto begin = Clock::now();
    for (int64_t i = 0; i < count; ++i) {
      first[0] = random ? generator.below(volume.shape()[0]) : i % volume.shape()[0];
      volume.read_into(into, first, box);
    }
    std::printf("%s %.6f\n", random ? "random" : "sequential", since(begin));
  }
  const Volume volume = open_volume(argv[1], {.dataset = argv[2]});
  Shape box = volume.shape();
  std::fill_n(&box[0], box.dim(), 0);
  box[0] = 1;
  const VolumeBoxes boxes({volume}, {.box = box, .batch = 4});
  Prefetcher loader([&](int64_t i) { return boxes.batch(i); });
  const auto begin = Clock::now();
  for (int64_t i = 0; i < count / 4; ++i) {
    loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::printf("waited %.6f\n", loader.waited() / since(begin));
}
