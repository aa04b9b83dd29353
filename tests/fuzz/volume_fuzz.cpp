// A target for libFuzzer: any bytes opened and read as a volume. An error is right; a crash, a hang or growth
// is not. Build and run beside a release build, with small files of each layout as a corpus:
//   clang++ -std=c++20 -g -fsanitize=fuzzer -Ibuild/include tests/fuzz/volume_fuzz.cpp -Lbuild -ltorus \
//     -Wl,-rpath,$PWD/build -o build/volume_fuzz
//   build/volume_fuzz -max_len=65536 -timeout=10 -rss_limit_mb=2048 CORPUS
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "torus/data/volume.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int file = ::memfd_create("volume", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  try {
    const torus::Volume volume = torus::open_volume(path);
    if (volume.shape().numel() < int64_t{1} << 20) volume.read();
  } catch (const torus::Error&) {
  }
  return 0;
}
