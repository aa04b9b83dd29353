// Files of other programs, written through the HDF5 library itself.
#pragma once

#include <gtest/gtest.h>
#include <hdf5.h>

#include <cstring>
#include <string>
#include <vector>

namespace torus {

class Foreign {
 public:
  explicit Foreign(const std::string& path)
      : file_(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)) {}
  ~Foreign() { H5Fclose(file_); }
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;
  operator hid_t() const { return file_; }

  void group(const std::string& name) { H5Gclose(H5Gcreate2(file_, name.c_str(), 0, 0, 0)); }

  /// An empty shape is a scalar. `options` are closed.
  void write(const std::string& name, hid_t file_type, hid_t memory_type, const std::vector<hsize_t>& shape,
             const void* data, hid_t options = H5P_DEFAULT) {
    const hid_t space = space_of(shape);
    const hid_t dataset =
        H5Dcreate2(file_, name.c_str(), file_type, space, H5P_DEFAULT, options, H5P_DEFAULT);
    ASSERT_GE(dataset, 0) << name;
    if (data) {
      EXPECT_GE(H5Dwrite(dataset, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0) << name;
    }
    H5Dclose(dataset);
    H5Sclose(space);
    if (options != H5P_DEFAULT) H5Pclose(options);
  }
  void write(const std::string& name, const std::vector<double>& values, const std::vector<hsize_t>& shape,
             hid_t file_type = H5T_IEEE_F64LE) {
    write(name, file_type, H5T_NATIVE_DOUBLE, shape, values.data());
  }
  /// Complex numbers, from pairs.
  void write_complex(const std::string& name, const std::vector<float>& parts,
                     const std::vector<hsize_t>& shape, const char* real = "r", const char* imaginary = "i",
                     hid_t part = H5T_IEEE_F32LE, hid_t options = H5P_DEFAULT) {
    const hid_t file_type = pair(real, imaginary, part),
                memory_type = pair(real, imaginary, H5T_NATIVE_FLOAT);
    write(name, file_type, memory_type, shape, parts.data(), options);
    H5Tclose(file_type);
    H5Tclose(memory_type);
  }
  /// One string, of variable length or padded by zeros to `bytes`.
  void write_text(const std::string& name, const std::string& text, size_t bytes = 0,
                  const std::vector<hsize_t>& shape = {}) {
    const hid_t type = text_type(bytes);
    std::string padded = text;
    padded.resize(std::max(bytes, text.size() + 1));
    const char* pointer = padded.c_str();
    write(name, type, type, shape, bytes ? static_cast<const void*>(pointer) : &pointer);
    H5Tclose(type);
  }
  void attribute(const std::string& object, const char* name, const std::vector<double>& values,
                 hid_t file_type = H5T_IEEE_F64LE) {
    attribute(object, name, file_type, H5T_NATIVE_DOUBLE,
              values.size() == 1 ? std::vector<hsize_t>{} : std::vector<hsize_t>{values.size()},
              values.data());
  }
  void attribute(const std::string& object, const char* name, const std::string& text) {
    const hid_t type = text_type(text.size() + 1);
    attribute(object, name, type, type, {}, text.c_str());
    H5Tclose(type);
  }

  /// A text of variable length, as h5py writes them.
  void variable_attribute(const std::string& object, const char* name, const std::string& text) {
    const hid_t type = text_type(0);
    const char* pointer = text.c_str();
    attribute(object, name, type, type, {}, &pointer);
    H5Tclose(type);
  }

  static hid_t pair(const char* real, const char* imaginary, hid_t part) {
    const hid_t type = H5Tcreate(H5T_COMPOUND, 2 * H5Tget_size(part));
    H5Tinsert(type, real, 0, part);
    H5Tinsert(type, imaginary, H5Tget_size(part), part);
    return type;
  }
  /// Chunks of this shape, for filters to be added.
  static hid_t chunked(const std::vector<hsize_t>& shape) {
    const hid_t options = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(options, static_cast<int>(shape.size()), shape.data());
    return options;
  }

 private:
  static hid_t space_of(const std::vector<hsize_t>& shape) {
    return shape.empty() ? H5Screate(H5S_SCALAR)
                         : H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
  }
  static hid_t text_type(size_t bytes) {
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, bytes ? bytes : H5T_VARIABLE);
    return type;
  }
  void attribute(const std::string& object, const char* name, hid_t file_type, hid_t memory_type,
                 const std::vector<hsize_t>& shape, const void* data) {
    const hid_t holder = H5Oopen(file_, object.c_str(), H5P_DEFAULT), space = space_of(shape);
    const hid_t id = H5Acreate2(holder, name, file_type, space, H5P_DEFAULT, H5P_DEFAULT);
    EXPECT_GE(H5Awrite(id, memory_type, data), 0);
    H5Aclose(id);
    H5Sclose(space);
    H5Oclose(holder);
  }

  hid_t file_;
};

}  // namespace torus
