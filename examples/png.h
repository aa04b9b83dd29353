// Pictures.
#pragma once

#include <png.h>

#include <cstring>
#include <string>
#include <vector>

#include "torus/core/error.h"

/// Writes rows of 8-bit grey, [height][width]. Throws torus::Error{File}.
inline void write_png(const std::string& path, const std::vector<unsigned char>& grey, int width,
                      int height) {
  png_image image;
  std::memset(&image, 0, sizeof image);
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  image.format = PNG_FORMAT_GRAY;
  torus::check(png_image_write_to_file(&image, path.c_str(), 0, grey.data(), 0, nullptr),
               torus::Error::Kind::File, "[png] cannot write ", path, ": ", image.message);
}
