// Pictures with labels and lines: panels of images, and plots.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "write_png.h"

/// How pictures of volumes that know where they lie are turned.
constexpr const char* radiological =
    "radiological: the patient's right is on the left, anterior and superior are up";

/// An image of other sizes, each pixel the mean of those that it covers.
inline std::vector<double> resized(const std::vector<double>& image, int64_t rows, int64_t columns,
                                   int64_t height, int64_t width) {
  const auto covered = [](int64_t at, int64_t from, int64_t to) {  // of `from` elements, by one of `to`
    const int64_t first = at * from / to;
    return std::pair{first, std::max(first + 1, (at + 1) * from / to)};
  };
  std::vector<double> result;
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) {
      const auto [top, bottom] = covered(y, rows, height);
      const auto [left, right] = covered(x, columns, width);
      double sum = 0;
      for (int64_t row = top; row < bottom; ++row)
        for (int64_t column = left; column < right; ++column)
          sum += image[static_cast<size_t>(row * columns + column)];
      result.push_back(sum / static_cast<double>((bottom - top) * (right - left)));
    }
  return result;
}

using Color = std::array<unsigned char, 3>;

/// Pixels of red, green and blue, at first all of one color. What lies outside is not drawn.
class Picture {
 public:
  Picture(int64_t width, int64_t height, Color background)
      : width_(width), height_(height), pixels_(static_cast<size_t>(3 * width * height)) {
    rectangle(0, 0, width, height, background);
  }

  void set(int64_t x, int64_t y, Color color) {
    if (x < 0 || y < 0 || x >= width_ || y >= height_) return;
    std::copy(color.begin(), color.end(), pixels_.begin() + 3 * (y * width_ + x));
  }
  void rectangle(int64_t left, int64_t top, int64_t width, int64_t height, Color color) {
    for (int64_t y = top; y < top + height; ++y)
      for (int64_t x = left; x < left + width; ++x) set(x, y, color);
  }
  void line(double x0, double y0, double x1, double y1, int64_t thickness, Color color) {
    const auto steps = static_cast<int64_t>(std::max({1., std::abs(x1 - x0), std::abs(y1 - y0)}));
    for (int64_t i = 0; i <= steps; ++i) {
      const double at = static_cast<double>(i) / static_cast<double>(steps);
      rectangle(std::lround(x0 + at * (x1 - x0)) - thickness / 2,
                std::lround(y0 + at * (y1 - y0)) - thickness / 2, thickness, thickness, color);
    }
  }
  /// Rows of grey from 0 to 255, each pixel `zoom` wide.
  void image(int64_t left, int64_t top, const std::vector<unsigned char>& grey, int64_t columns,
             int64_t zoom) {
    for (size_t i = 0; i < grey.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      rectangle(left + at % columns * zoom, top + at / columns * zoom, zoom, zoom,
                {grey[i], grey[i], grey[i]});
    }
  }
  /// Capitals, digits and ".-+%/:,()", 8 pixels a character, 10 high.
  void text(int64_t left, int64_t top, const std::string& line, Color color) {
    for (const char character : line) {
      const char* rows = glyph(character);
      for (int64_t y = 0; y < 5; ++y)
        for (int64_t x = 0; x < 3; ++x)
          if ((rows[y] - '0') >> (2 - x) & 1) rectangle(left + 2 * x, top + 2 * y, 2, 2, color);
      left += 8;
    }
  }

  void write(const std::string& path) const {
    write_png(path, pixels_, static_cast<int>(width_), static_cast<int>(height_), PNG_FORMAT_RGB);
  }

 private:
  // Five rows of three bits.
  static const char* glyph(char character) {
    static constexpr std::pair<char, const char*> glyphs[] = {
        {'0', "75557"}, {'1', "26227"}, {'2', "71747"}, {'3', "71717"}, {'4', "55711"}, {'5', "74717"},
        {'6', "74757"}, {'7', "71122"}, {'8', "75757"}, {'9', "75717"}, {'A', "25755"}, {'B', "65656"},
        {'C', "34443"}, {'D', "65556"}, {'E', "74647"}, {'F', "74644"}, {'G', "34553"}, {'H', "55755"},
        {'I', "72227"}, {'J', "11152"}, {'K', "55655"}, {'L', "44447"}, {'M', "57755"}, {'N', "65555"},
        {'O', "25552"}, {'P', "65644"}, {'Q', "25563"}, {'R', "65655"}, {'S', "34216"}, {'T', "72222"},
        {'U', "55557"}, {'V', "55552"}, {'W', "55775"}, {'X', "55255"}, {'Y', "55222"}, {'Z', "71247"},
        {'.', "00002"}, {'-', "00700"}, {'+', "02720"}, {'%', "51245"}, {'/', "11244"}, {':', "02020"},
        {',', "00024"}, {'(', "12221"}, {')', "42224"}};
    const char capital =
        character >= 'a' && character <= 'z' ? static_cast<char>(character - 'a' + 'A') : character;
    for (const auto& [named, rows] : glyphs)
      if (named == capital) return rows;
    return "00000";
  }

  int64_t width_, height_;
  std::vector<unsigned char> pixels_;
};
