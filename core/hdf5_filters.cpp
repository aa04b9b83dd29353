// Filters of chunks: their names, and lzf, which h5py writes and the library lacks.
#include <cstdlib>
#include <cstring>

#include "torus/core/hdf5_handles.h"

namespace torus::h5 {

namespace {

constexpr H5Z_filter_t lzf = 32000;

// Unpacks LZF: a byte c < 32 announces c + 1 literal bytes; any other a copy of (c >> 5) + 2 bytes (with 7,
// the next byte adds to the length) from 1 + ((c & 31) << 8) + the last byte before here. Returns the bytes
// written, 0 on a stream that does not fit.
size_t unpack_lzf(const uint8_t* in, size_t size, uint8_t* out, size_t room) {
  size_t read = 0, written = 0;
  while (read < size) {
    const size_t control = in[read++];
    if (control < 32) {
      const size_t count = control + 1;
      if (count > size - read || count > room - written) return 0;
      std::memcpy(out + written, in + read, count);
      read += count;
      written += count;
      continue;
    }
    size_t count = control >> 5;
    if (count == 7) {
      if (read == size) return 0;
      count += in[read++];
    }
    count += 2;
    if (read == size) return 0;
    const size_t back = ((control & 31) << 8) + in[read++] + 1;
    if (back > written || count > room - written) return 0;
    for (; count > 0; --count, ++written) out[written] = out[written - back];  // they may overlap
  }
  return written;
}

size_t filter_lzf(unsigned flags, size_t count, const unsigned* values, size_t bytes, size_t* buffer_bytes,
                  void** buffer) {
  // The third value is the size of a chunk: what comes out, and all that may.
  if (!(flags & H5Z_FLAG_REVERSE) || count < 3 || values[2] == 0) return 0;
  const size_t room = values[2];
  void* out = std::malloc(room);
  if (!out) return 0;
  const size_t written =
      unpack_lzf(static_cast<const uint8_t*>(*buffer), bytes, static_cast<uint8_t*>(out), room);
  if (written == 0) {
    std::free(out);
    return 0;
  }
  std::free(*buffer);
  *buffer = out;
  *buffer_bytes = room;
  return written;
}

struct Known {
  int id;
  const char* name;
  const char* package;
};

constexpr Known known[] = {
    {H5Z_FILTER_DEFLATE, "deflate", "an HDF5 library built with zlib"},
    {H5Z_FILTER_SHUFFLE, "shuffle", "an HDF5 library"},
    {H5Z_FILTER_FLETCHER32, "fletcher32", "an HDF5 library"},
    {H5Z_FILTER_SZIP, "szip", "an HDF5 library built with libaec or szip"},
    {H5Z_FILTER_NBIT, "nbit", "an HDF5 library"},
    {H5Z_FILTER_SCALEOFFSET, "scaleoffset", "an HDF5 library"},
    {lzf, "lzf", "this library"},
    {307, "bzip2", "hdf5-filter-plugin"},
    {32001, "blosc", "hdf5-filter-plugin-blosc-serial"},
    {32004, "lz4", "hdf5-filter-plugin"},
    {32008, "bitshuffle", "hdf5-filter-plugin"},
    {32013, "zfp", "hdf5-filter-plugin-zfp-serial"},
    {32015, "zstd", "python3-hdf5plugin"},
    {32026, "blosc2", "python3-hdf5plugin"},
};

}  // namespace

void register_filters() {
  static const H5Z_class2_t reader = {H5Z_CLASS_T_VERS, lzf, 0, 1, "lzf", nullptr, nullptr, filter_lzf};
  H5Zregister(&reader);
}

std::string filter_name(int id) {
  for (const Known& filter : known)
    if (filter.id == id) return filter.name;
  return "filter " + std::to_string(id);
}

std::string filter_package(int id) {
  for (const Known& filter : known)
    if (filter.id == id) return filter.package;
  return "its plugin, and point HDF5_PLUGIN_PATH at it";
}

}  // namespace torus::h5
