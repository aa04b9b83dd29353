// Writes pictures. (Named so that <png.h> stays libpng's where this folder is searched for headers.)
#pragma once

#include <png.h>

#include <cstring>
#include <string>
#include <vector>

#include "torus/core/error.h"

/// Writes rows of 8-bit pixels, [height][width], grey or as `format` says. Throws torus::Error{File}.
inline void write_png(const std::string& path, const std::vector<unsigned char>& pixels, int width,
                      int height, png_uint_32 format = PNG_FORMAT_GRAY) {
  png_image image;
  std::memset(&image, 0, sizeof image);
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  image.format = format;
  torus::check(png_image_write_to_file(&image, path.c_str(), 0, pixels.data(), 0, nullptr),
               torus::Error::Kind::File, "[png] cannot write ", path, ": ", image.message);
}
