// A target for libFuzzer: any bytes opened and read as a volume. An error is right; a crash, a hang or growth
// is not. Small files of each layout are the corpus. A report with a frame of torus on top is ours; below
// frames of libhdf5 it is the library's.
//   ninja -C build volume_fuzz
//   ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 build/tests/volume_fuzz \
//     -max_len=140000 -timeout=10 -rss_limit_mb=4096 CORPUS
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "torus/data/volume.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::string path = "/dev/shm/volume-fuzz-XXXXXX";
  static const int file = ::mkstemp(path.data());
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  try {
    const torus::Volume volume = torus::open_volume(path);
    if (volume.shape().numel() < int64_t{1} << 20) volume.read();
  } catch (const torus::Error&) {
  }
  return 0;
}
