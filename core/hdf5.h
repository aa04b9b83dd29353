// HDF5 files of tensors and attributes, and files that are replaced whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "torus/core/tensor.h"

namespace torus {

/// What an attribute holds.
using Hdf5Value = std::variant<std::string, int64_t, double, std::vector<std::string>, std::vector<int64_t>,
                               std::vector<double>>;

/// An open HDF5 file. The library is not safe for threads, so every call of it takes one lock of the process;
/// files may be used from any thread. Every failure throws one line, Error{File}, that names the file.
/// Objects are named by their path from the root: "model/head.weight".
///
/// What is written carries checksums, so reading damaged data throws. Tensors keep their dtype: f16 and bf16
/// are floating types of HDF5, bool is an enumeration as h5py's. In files of others, i8, i16 and u16 read as
/// i32; u32 and u64 as i64; any other float as the next wider one.
class Hdf5File {
 public:
  /// Opens a file to read.
  static Hdf5File open(const std::string& path);
  /// Makes a file to write, in place of one that is there.
  static Hdf5File create(const std::string& path);

  Hdf5File(Hdf5File&&) noexcept;
  Hdf5File& operator=(Hdf5File&&) noexcept;
  /// Closes without a report of what fails: a writer calls close().
  ~Hdf5File();

  /// Writes out what is buffered, waits until the disk holds it, and closes. Throws if any of it fails, as on
  /// a full disk; the file is closed all the same. No other member may be called after it.
  void close();

  struct Entry {
    std::string name;
    bool is_group = false;
  };
  /// The groups and datasets in a group, sorted by name.
  std::vector<Entry> list(const std::string& group = "/") const;
  /// True if there is a group or dataset of this name.
  bool contains(const std::string& name) const;

  struct Dataset {
    Shape shape;
    DType dtype = f32;  // that `read` gives
  };
  Dataset dataset(const std::string& name) const;

  Tensor read(const std::string& name) const;
  /// The same, for data that must have this shape and dtype.
  Tensor read(const std::string& name, const Shape& shape, DType dtype) const;
  /// The box of `count` elements an axis that begins at `first`.
  Tensor read_box(const std::string& name, const Shape& first, const Shape& count) const;

  /// Writes a new dataset, and the groups that its name needs.
  void write(const std::string& name, const Tensor& tensor);
  /// Makes a group, and those above it; one that is there stays.
  void create_group(const std::string& name);

  /// Attributes of a group ("/" is the root) or dataset. `set_attribute` replaces one that is there.
  void set_attribute(const std::string& object, const std::string& name, const Hdf5Value& value);
  bool has_attribute(const std::string& object, const std::string& name) const;
  /// T is one of the types of Hdf5Value. Integers widen to double; one element reads as a scalar or as an
  /// array.
  template <class T>
  T attribute(const std::string& object, const std::string& name) const;

  const std::string& path() const;

 private:
  struct State;
  explicit Hdf5File(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Replaces the file at `path` as a whole: calls `writer` with the name of a temporary file in the same
/// folder, waits until the disk holds what it wrote, and renames it to `path`. If anything fails the
/// temporary file is removed, what was at `path` stays, and the error is thrown on.
void write_atomically(const std::string& path,
                      const std::function<void(const std::string& temporary)>& writer);

}  // namespace torus
