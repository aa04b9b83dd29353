// HDF5 files of tensors and attributes, and files that are replaced whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "torus/core/tensor.h"

namespace torus {

/// Names and text of a file, which may hold anything, as they can be shown: control characters, line breaks
/// among them, are spaces.
std::string printable(std::string text);

/// What an attribute holds.
using Hdf5Value = std::variant<std::string, int64_t, double, std::vector<std::string>, std::vector<int64_t>,
                               std::vector<double>>;

class Hdf5Dataset;

/// How far a file is trusted. By default it reads nothing but itself, and only what it really stores.
struct Hdf5Trust {
  /// Follow external links, external storage and virtual datasets, which name other files.
  bool other_files = false;
  /// Read datasets that declare more than 1100 times the bytes that are stored for them: more than any filter
  /// packs.
  bool sparse = false;
};

/// What a file says of a dataset before any of it is read.
struct Hdf5Info {
  enum class Kind { number, complex, text, records, other };
  struct Filter {
    int id;
    std::string name;
    bool available;  // in this library
  };

  Kind kind = Kind::other;
  Shape shape;         // a complex number is one element; a scalar has no axes
  bool empty = false;  // it has no dataspace: there is nothing to read
  DType dtype = f32;   // of numbers, and of both parts of complex ones: holds each of their values
  std::string type;    // as people say it: "i16", "big-endian f32", "complex f32 {r, i}"
  int64_t element_bytes = 0;
  int64_t stored_bytes = 0;  // after the filters
  Shape chunk;               // no axes: not in chunks
  std::vector<Filter> filters;
};

/// An open HDF5 file. The library is not safe for threads, so every call of it takes one lock of the process;
/// files may be used from any thread. Every failure throws one printable line, Error{File}, that names the
/// file. Objects are named by their path from the root: "model/head.weight".
///
/// What is written carries checksums, so reading damaged data throws. Tensors keep their dtype: f16 and bf16
/// are floating types of HDF5, bool is an enumeration as h5py's. In files of others, i8, i16 and u16 read as
/// i32; u32 and u64 as i64; any other float as the next wider one.
///
/// Files to read are never written to and need no permission to write. They survive fork: the child opens
/// them again.
class Hdf5File {
 public:
  /// Opens a file to read.
  static Hdf5File open(const std::string& path, const Hdf5Trust& trust = {});
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
    bool is_link = false;  // a soft or external one
  };
  /// The groups and datasets in a group, sorted by name. Links that lead nowhere, and those out of the file
  /// unless it is trusted, are left out.
  std::vector<Entry> list(const std::string& group = "/") const;
  /// All groups and datasets below the root, by their paths, each once, however many hard links lead to it.
  std::vector<Entry> walk() const;
  /// True if there is a group or dataset of this name.
  bool contains(const std::string& name) const;

  struct Dataset {
    Shape shape;
    DType dtype = f32;  // that `read` gives
  };
  Dataset dataset(const std::string& name) const;
  /// The same for a dataset of any type, and more.
  Hdf5Info describe(const std::string& name) const;
  /// A dataset to read piece by piece. `cache_bytes` of chunks are kept; 0: 64 MiB, or if that is more (up to
  /// 512 MiB) all chunks that meet one slice of the first axis.
  Hdf5Dataset open_dataset(const std::string& name, int64_t cache_bytes = 0) const;

  Tensor read(const std::string& name) const;
  /// The same, for data that must have this shape and dtype.
  Tensor read(const std::string& name, const Shape& shape, DType dtype) const;
  /// The box of `count` elements an axis that begins at `first`.
  Tensor read_box(const std::string& name, const Shape& first, const Shape& count) const;
  /// A dataset of one string, of fixed or variable length.
  std::string read_text(const std::string& name) const;

  /// Writes a new dataset, and the groups that its name needs.
  void write(const std::string& name, const Tensor& tensor);
  /// Writes a new dataset of zeros, in parts by `write_box`.
  void create_dataset(const std::string& name, const Shape& shape, DType dtype);
  /// Writes the box of a dataset that begins at `first` and has the tensor's shape and dtype.
  void write_box(const std::string& name, const Shape& first, const Tensor& tensor);
  /// Makes a group, and those above it; one that is there stays.
  void create_group(const std::string& name);

  /// Attributes of a group ("/" is the root) or dataset. `set_attribute` replaces one that is there.
  void set_attribute(const std::string& object, const std::string& name, const Hdf5Value& value);
  bool has_attribute(const std::string& object, const std::string& name) const;
  /// T is one of the types of Hdf5Value. Integers widen to double; one element reads as a scalar or as an
  /// array.
  template <class T>
  T attribute(const std::string& object, const std::string& name) const;
  /// What there is: a string, number or array of them; nothing if there is no such attribute or no C++ type
  /// for it.
  std::optional<Hdf5Value> find_attribute(const std::string& object, const std::string& name) const;
  std::vector<std::string> attributes(const std::string& object) const;

  /// Gives back every handle of a file to read, and what its datasets cache; the next use opens them again.
  void release() const;

  const std::string& path() const;

  struct State;

 private:
  friend class Hdf5Dataset;
  explicit Hdf5File(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// A dataset that is read piece by piece, and keeps its file open. Before the library is asked for anything,
/// the type, the extents, the filters and where the bytes lie are checked.
class Hdf5Dataset {
 public:
  const Hdf5Info& info() const;
  const std::string& name() const;

  /// Elements first, first + step, ..., `count` of them an axis, as f32, f64 or info().dtype; step {} is 1
  /// everywhere. Complex numbers have a last axis of 2.
  Tensor read(const Shape& first, const Shape& count, DType dtype, const Shape& step = {}) const;
  /// The same into a contiguous tensor of the result's numel.
  void read_into(Tensor& into, const Shape& first, const Shape& count, const Shape& step = {}) const;

  /// The names of all numbers and arrays of numbers in a record: "head/idx/slice".
  std::vector<std::string> members() const;
  /// Members of records [first, first + count) of one axis, found by name: [count] or, for arrays, [count,
  /// n]; integers as i64 (u64 bit by bit), floats as f64.
  std::vector<Tensor> read_members(const std::vector<std::string>& members, int64_t first,
                                   int64_t count) const;

  /// A member whose length varies, of as many records from `first` on as there are lengths, one after
  /// another. Throws, naming the record, where one has another length.
  std::vector<float> read_lists(const std::string& member, int64_t first,
                                const std::vector<int64_t>& lengths) const;

  /// Reads everything, in pieces of bounded size, and forgets it. Throws at the first fault.
  void verify() const;

  struct State;

 private:
  friend class Hdf5File;
  explicit Hdf5Dataset(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// Replaces the file at `path` as a whole: calls `writer` with the name of a temporary file in the same
/// folder, waits until the disk holds what it wrote, and renames it to `path`. If anything fails the
/// temporary file is removed, what was at `path` stays, and the error is thrown on.
void write_atomically(const std::string& path,
                      const std::function<void(const std::string& temporary)>& writer);

}  // namespace torus
