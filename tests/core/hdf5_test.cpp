#include "torus/core/hdf5.h"

#include <gtest/gtest.h>
#include <hdf5.h>
#include <rapidcheck/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstring>
#include <thread>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "torus/core/random.h"

namespace torus {
namespace {

// The elements as they lie in memory, so that NaNs compare too.
std::string bytes_of(const Tensor& tensor) {
  const Tensor flat = tensor.contiguous();
  return dispatch(flat.dtype(), [&](auto zero) {
    const auto* data = reinterpret_cast<const char*>(flat.data<decltype(zero)>());
    return std::string(data, static_cast<size_t>(flat.numel()) * size_of(flat.dtype()));
  });
}

bool equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && bytes_of(a) == bytes_of(b);
}

const std::vector<DType> all_dtypes = {f64, f32, f16, bf16, i64, i32, u8, boolean};

TEST(Hdf5, KeepsEveryDtypeAndShape) {
  const TemporaryFolder folder;
  const std::vector<Shape> shapes = {
      {}, {1}, {0}, {3, 0, 2}, {5}, {2, 3, 4}, {1, 1, 1, 1, 1, 1, 1, 2}, {300, 7, 11}};
  std::vector<std::pair<std::string, Tensor>> written;
  auto file = Hdf5File::create(folder / "all.h5");
  for (DType dtype : all_dtypes)
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Tensor tensor = randn(shapes[i], 0, 30, f64).to(dtype == u8 ? boolean : dtype).to(dtype);
      written.emplace_back(std::string(name(dtype)) + "/" + std::to_string(i), tensor);
      file.write(written.back().first, tensor);
    }
  // Every bit pattern of 16-bit floats, NaNs with their payloads.
  for (DType dtype : {f16, bf16}) {
    Tensor patterns = Tensor::empty({256, 256}, dtype);
    for (int i = 0; i < 0x10000; ++i) {
      if (dtype == f16)
        patterns.mutable_data<Half>()[i].bits = static_cast<uint16_t>(i);
      else
        patterns.mutable_data<BFloat16>()[i].bits = static_cast<uint16_t>(i);
    }
    written.emplace_back(std::string("patterns/") + name(dtype), patterns);
    file.write(written.back().first, patterns);
  }
  const Tensor turned = randn({40, 30}).transpose(0, 1);
  written.emplace_back("turned", turned);
  file.write("turned", turned);
  file.close();

  const auto again = Hdf5File::open(folder / "all.h5");
  for (const auto& [name, tensor] : written) {
    EXPECT_TRUE(equal(again.read(name), tensor)) << name;
    EXPECT_TRUE(equal(again.read(name, tensor.shape(), tensor.dtype()), tensor)) << name;
    EXPECT_EQ(again.dataset(name).shape, tensor.shape());
    EXPECT_EQ(again.dataset(name).dtype, tensor.dtype());
  }
}

TEST(Hdf5, EqualContentMakesEqualFiles) {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) {
    auto file = Hdf5File::create(folder / name);
    file.write("deep/er/x", Tensor::arange(5000));
    file.set_attribute("deep", "note", "same");
    file.close();
  }
  EXPECT_EQ(read_file(folder / "a"), read_file(folder / "b"));
}

RC_GTEST_PROP(Hdf5, BoxesMatchSlices, ()) {
  const auto pick = [](int64_t low, int64_t high) { return *rc::gen::inRange<int64_t>(low, high + 1); };
  const TemporaryFolder folder;
  Shape shape, first, count;
  for (int64_t axes = pick(0, 4); axes > 0; --axes) {
    shape.push_back(pick(0, 20));
    first.push_back(pick(0, shape.back()));
    count.push_back(pick(0, shape.back() - first.back()));
  }
  const Tensor tensor = Tensor::arange(shape.numel(), i32).reshape(shape);
  auto file = Hdf5File::create(folder / "x.h5");
  file.write("x", tensor);
  file.close();
  Tensor expected = tensor;
  for (int axis = 0; axis < shape.dim(); ++axis)
    expected = expected.slice(axis, first[axis], first[axis] + count[axis]);
  RC_ASSERT(equal(Hdf5File::open(folder / "x.h5").read_box("x", first, count), expected.contiguous()));
}

TEST(Hdf5, Attributes) {
  const TemporaryFolder folder;
  const std::string text = std::string("Zürich\n\0 ", 9) + "end";
  const std::vector<int64_t> many(20000, -3);  // more than an object header holds
  auto file = Hdf5File::create(folder / "x.h5");
  file.create_group("model/config");
  file.set_attribute("/", "version", 1);
  file.set_attribute("/", "version", 2);
  file.set_attribute("/", "text", text);
  file.set_attribute("/", "empty", "");
  file.set_attribute("model/config", "rate", 0.1);
  file.set_attribute("model", "words", std::vector<std::string>{"a", "", "long word"});
  file.set_attribute("model", "many", many);
  file.set_attribute("model", "rates", std::vector<double>{1e-300, INFINITY});
  file.set_attribute("model", "none", std::vector<int64_t>{});
  file.set_attribute("model", "no words", std::vector<std::string>{});
  file.write("x", Tensor::arange(3));
  file.set_attribute("x", "unit", "mm");
  file.close();

  const auto again = Hdf5File::open(folder / "x.h5");
  EXPECT_EQ(again.attribute<int64_t>("/", "version"), 2);
  EXPECT_EQ(again.attribute<double>("/", "version"), 2.);
  EXPECT_EQ(again.attribute<std::vector<int64_t>>("/", "version"), std::vector<int64_t>{2});
  EXPECT_EQ(again.attribute<std::string>("/", "text"), text);
  EXPECT_EQ(again.attribute<std::string>("/", "empty"), "");
  EXPECT_EQ(again.attribute<double>("model/config", "rate"), 0.1);
  EXPECT_EQ(again.attribute<std::vector<std::string>>("model", "words"),
            (std::vector<std::string>{"a", "", "long word"}));
  EXPECT_EQ(again.attribute<std::vector<int64_t>>("model", "many"), many);
  EXPECT_EQ(again.attribute<std::vector<double>>("model", "rates"), (std::vector<double>{1e-300, INFINITY}));
  EXPECT_TRUE(again.attribute<std::vector<int64_t>>("model", "none").empty());
  EXPECT_TRUE(again.attribute<std::vector<std::string>>("model", "no words").empty());
  EXPECT_EQ(again.attribute<std::string>("x", "unit"), "mm");
  EXPECT_TRUE(again.has_attribute("x", "unit"));
  EXPECT_FALSE(again.has_attribute("x", "other"));
  EXPECT_ERROR(again.attribute<int64_t>("x", "other"), File, "has no attribute 'other'");
  EXPECT_ERROR(again.attribute<int64_t>("x", "unit"), File, "no dtype holds");
  EXPECT_ERROR(again.attribute<std::string>("/", "version"), File, "is not a string");
  EXPECT_ERROR(again.attribute<int64_t>("model/config", "rate"), File, "is not an integer");
  EXPECT_ERROR(again.attribute<int64_t>("model", "many"), File, "must have one element, got 20000");
  EXPECT_ERROR(again.attribute<int64_t>("nowhere", "rate"), File, "has no 'nowhere'");
}

TEST(Hdf5, ListsGroupsAndDatasets) {
  const TemporaryFolder folder;
  auto file = Hdf5File::create(folder / "x.h5");
  file.write("b/y", Tensor::arange(1));
  file.write("/b/x", Tensor::arange(1));
  file.create_group("a");
  file.create_group("/a/deep/er");
  file.create_group("b");
  const auto show = [&](const std::string& group) {
    std::string text;
    for (const auto& entry : file.list(group)) text += entry.name + (entry.is_group ? "/ " : " ");
    return text;
  };
  EXPECT_EQ(show("/"), "a/ b/ ");
  EXPECT_EQ(show("b"), "x y ");
  EXPECT_EQ(show("/a"), "deep/ ");
  EXPECT_EQ(show("a/deep/er"), "");
  EXPECT_ERROR(file.list("b/x"), File, "'b/x' is not a group");
  EXPECT_ERROR(file.list("c"), File, "has no 'c'");
  for (const char* there : {"/", "a", "/a", "a/deep/er", "b/x"}) EXPECT_TRUE(file.contains(there)) << there;
  for (const char* absent : {"c", "a/x", "c/d/e", "b/x/y", "er"})
    EXPECT_FALSE(file.contains(absent)) << absent;
}

// A file of another program, written through the library itself.
class Foreign {
 public:
  explicit Foreign(const std::string& path)
      : file_(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)) {}
  ~Foreign() { H5Fclose(file_); }
  operator hid_t() const { return file_; }

  void write(const char* name, hid_t file_type, hid_t memory_type, std::vector<hsize_t> shape,
             const void* data, hid_t options = H5P_DEFAULT) {
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t dataset = H5Dcreate2(file_, name, file_type, space, H5P_DEFAULT, options, H5P_DEFAULT);
    EXPECT_GE(H5Dwrite(dataset, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    H5Dclose(dataset);
    H5Sclose(space);
  }

 private:
  hid_t file_;
};

TEST(Hdf5, WidensTypesOfOtherPrograms) {
  const TemporaryFolder folder;
  {
    Foreign file(folder / "x.h5");
    const int64_t small[2] = {-5, 100}, large[2] = {5, 4000000000};
    const uint64_t huge[2] = {1, uint64_t{1} << 63};
    const double reals[2] = {-0.5, 3};
    for (const auto& [name, type] : std::vector<std::pair<const char*, hid_t>>{
             {"i8", H5T_STD_I8LE}, {"i16", H5T_STD_I16BE}, {"i32", H5T_STD_I32BE}, {"i64", H5T_STD_I64BE}})
      file.write(name, type, H5T_NATIVE_INT64, {2}, small);
    for (const auto& [name, type] :
         std::vector<std::pair<const char*, hid_t>>{{"u32", H5T_STD_U32LE}, {"u64", H5T_STD_U64BE}})
      file.write(name, type, H5T_NATIVE_INT64, {2}, large);
    file.write("u8", H5T_STD_U8LE, H5T_NATIVE_INT64, {1}, small + 1);
    file.write("u16", H5T_STD_U16BE, H5T_NATIVE_INT64, {1}, small + 1);
    file.write("huge", H5T_STD_U64LE, H5T_NATIVE_UINT64, {2}, huge);
    file.write("f32", H5T_IEEE_F32BE, H5T_NATIVE_DOUBLE, {2}, reals);
    file.write("f64", H5T_IEEE_F64BE, H5T_NATIVE_DOUBLE, {2}, reals);
    file.write("long", H5T_NATIVE_LDOUBLE, H5T_NATIVE_DOUBLE, {2}, reals);
    const hid_t options = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t chunk[1] = {2};
    H5Pset_chunk(options, 1, chunk);
    H5Pset_deflate(options, 5);
    file.write("packed", H5T_STD_I16LE, H5T_NATIVE_INT64, {2}, small, options);
    H5Pclose(options);
    const hid_t colour = H5Tenum_create(H5T_STD_I8LE);
    for (int8_t value : {0, 7}) H5Tenum_insert(colour, value ? "BLUE" : "RED", &value);
    const int8_t colours[2] = {7, 0};
    file.write("colours", colour, colour, {2}, colours);
    H5Tclose(colour);
    const hid_t pair = H5Tcreate(H5T_COMPOUND, 8);
    H5Tinsert(pair, "r", 0, H5T_NATIVE_FLOAT);
    H5Tinsert(pair, "i", 4, H5T_NATIVE_FLOAT);
    const float complex[4] = {};
    file.write("complex", pair, pair, {2}, complex);
    H5Tclose(pair);
    file.write("nine axes", H5T_STD_I8LE, H5T_NATIVE_INT64, std::vector<hsize_t>(9, 1), small);
    H5Lcreate_soft("/nowhere", file, "soft", H5P_DEFAULT, H5P_DEFAULT);
    // Strings of variable length, as h5py writes them.
    const hid_t text = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(text, H5T_VARIABLE);
    const hid_t attribute = H5Acreate2(file, "note", text, space, H5P_DEFAULT, H5P_DEFAULT);
    const char* note = "variable";
    H5Awrite(attribute, text, &note);
    H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(text);
  }
  const auto file = Hdf5File::open(folder / "x.h5");
  const Tensor small = Tensor::from({int64_t{-5}, int64_t{100}}),
               large = Tensor::from({int64_t{5}, int64_t{4000000000}});
  for (const char* name : {"i8", "i16", "i32", "packed"})
    EXPECT_TRUE(equal(file.read(name), small.to(i32))) << name;
  EXPECT_TRUE(equal(file.read("i64"), small));
  EXPECT_TRUE(equal(file.read("u32"), large));
  EXPECT_TRUE(equal(file.read("u64"), large));
  EXPECT_TRUE(equal(file.read("u8"), Tensor::from({uint8_t{100}})));
  EXPECT_TRUE(equal(file.read("u16"), Tensor::from({100})));
  EXPECT_TRUE(equal(file.read("f32"), Tensor::from({-0.5f, 3.f})));
  EXPECT_TRUE(equal(file.read("f64"), Tensor::from({-0.5, 3.})));
  EXPECT_TRUE(equal(file.read("colours"), Tensor::from({7, 0})));
  EXPECT_EQ(file.attribute<std::string>("/", "note"), "variable");
  EXPECT_ERROR(file.read("huge"), File, "above 2^63 - 1");
  EXPECT_ERROR(file.read("long"), File, "no dtype holds");
  EXPECT_ERROR(file.read("complex"), File, "no dtype holds");
  EXPECT_ERROR(file.read("nine axes"), File, "has 9 axes");
  for (const auto& entry : file.list()) EXPECT_NE(entry.name, "soft");
}

TEST(Hdf5, ErrorsAreOneLineAndNothingIsPrinted) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  {
    const std::string path = folder / "x.h5";
    auto file = Hdf5File::create(path);
    file.write("x", Tensor::zeros({2, 3}));
    EXPECT_ERROR(file.write("x", Tensor::zeros({2})), File, path + ": 'x' is there already");
    EXPECT_ERROR(file.write("x/y", Tensor::zeros({2})), File, path);
    EXPECT_ERROR(file.write("y", Tensor()), Value, "undefined");
    file.close();
    EXPECT_ERROR(file.read("x"), File, "the file is closed");
    EXPECT_ERROR(file.close(), File, "the file is closed");

    auto again = Hdf5File::open(path);
    EXPECT_ERROR(again.read("y"), File, path + ": has no 'y'");
    EXPECT_ERROR(again.read("/"), File, "'/' is not a dataset");
    EXPECT_ERROR(again.read("x", {3, 2}, f32), File, path + ": 'x' must be f32 [3, 2], got f32 [2, 3]");
    EXPECT_ERROR(again.read("x", {2, 3}, f64), File, "'x' must be f64 [2, 3], got f32 [2, 3]");
    for (const auto& [first, count] : std::vector<std::pair<Shape, Shape>>{{{0, 0}, {2, 4}},
                                                                           {{-1, 0}, {1, 1}},
                                                                           {{0}, {2}},
                                                                           {{1, 0}, {2, 1}},
                                                                           {{0, 0}, {-1, 1}},
                                                                           {{3, 0}, {0, 1}}})
      EXPECT_ERROR(again.read_box("x", first, count), File, "'x' has shape [2, 3]; no box of");
    EXPECT_ERROR(again.write("z", Tensor::zeros({2})), File, path + ": cannot write 'z'");
    EXPECT_ERROR(again.set_attribute("x", "a", 1), File, path + ": cannot write the attribute 'a'");
    again.close();

    EXPECT_ERROR(Hdf5File::open(folder / "none.h5"), File, "none.h5: No such file or directory");
    EXPECT_ERROR(Hdf5File::open(folder / ""), File, "is a folder");
    EXPECT_ERROR(Hdf5File::create(folder / "no/such/folder.h5"), File,
                 "cannot make the file: No such file or directory");
    write_file(folder / "text.h5", "This is not HDF5.");
    EXPECT_ERROR(Hdf5File::open(folder / "text.h5"), File, "text.h5: not an HDF5 file, or damaged");
    write_file(folder / "empty.h5", "");
    EXPECT_ERROR(Hdf5File::open(folder / "empty.h5"), File, "empty.h5: not an HDF5 file, or damaged");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// Cut anywhere, or with any byte changed, a file gives an error or what was written: never other numbers.
TEST(Hdf5, DamageIsFound) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  const Tensor small = randn({5, 3}), large = randn({60, 40}, 0, 1, f64), scalar = Tensor::scalar(3, i64);
  {
    auto file = Hdf5File::create(path);
    file.write("model/small", small);
    file.write("model/large", large);
    file.write("scalar", scalar);
    file.set_attribute("model", "note", "a note");
    file.close();
  }
  const std::string good = read_file(path);
  const auto read_all = [&] {
    const auto file = Hdf5File::open(path);
    return equal(file.read("model/small"), small) && equal(file.read("model/large"), large) &&
           equal(file.read("scalar"), scalar) && file.attribute<std::string>("model", "note") == "a note";
  };
  ASSERT_TRUE(read_all());
  int64_t found = 0, harmless = 0;
  const auto damage = [&](const std::string& content, size_t at) {
    write_file(path, content);
    try {
      EXPECT_TRUE(read_all()) << at;
      ++harmless;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Error::Kind::File) << error.what();
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
      ++found;
    }
  };
  testing::internal::CaptureStderr();
  for (size_t size = 0; size < good.size(); size += 97) damage(good.substr(0, size), size);
  EXPECT_EQ(harmless, 0);
  found = 0;
  for (size_t at = 0; at < good.size(); at += at < 4096 ? 1 : 53) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (at % 3 == 0 ? 0xff : 1 << at % 8));
    damage(bad, at);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_GT(found, harmless);  // what is harmless lies in gaps
}

// Limits how large a file may grow, as a full disk does.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_;
};

TEST(Hdf5, FullDisk) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  const Tensor large = randn({1000, 300});
  const auto save = [&](const std::string& to) {
    auto file = Hdf5File::create(to);
    for (int i = 0; i < 100; ++i) file.write("group/" + std::to_string(i), Tensor::arange(i + 1));
    file.write("large", large);
    file.set_attribute("large", "note", "text");
    file.close();
  };
  write_atomically(path, save);
  const std::string good = read_file(path);
  // From nothing at all to all but the last byte.
  const auto size = static_cast<rlim_t>(good.size());
  for (rlim_t limit : {rlim_t{0}, rlim_t{1}, rlim_t{100}, rlim_t{2000}, size / 2, size - 3000, size - 1}) {
    const FileSizeLimit full(limit);
    EXPECT_ERROR(save(folder / "direct.h5"), File, "direct.h5: cannot ");
    EXPECT_ERROR(write_atomically(path, save), File, "File too large");
    EXPECT_EQ(read_file(path), good);  // the last good file survives
    std::filesystem::remove(folder / "direct.h5");
    EXPECT_EQ(folder.entries(), 1) << limit;
  }
  // With room again, the same process writes as before.
  write_atomically(path, save);
  EXPECT_EQ(read_file(path), good);
  EXPECT_ERROR(save("/dev/full"), File, "/dev/full: cannot make the file: No space left on device");
}

TEST(Hdf5, FilesOfManyThreads) {
  const TemporaryFolder folder;
  std::vector<std::thread> threads;
  std::vector<int> good(6);
  for (size_t t = 0; t < good.size(); ++t)
    threads.emplace_back([&, t] {
      Generator generator(t);
      for (int round = 0; round < 5; ++round) {
        const std::string path = folder / std::to_string(t);
        const Tensor tensor = randn({50, 40}, 0, 1, f32, generator);
        auto file = Hdf5File::create(path);
        for (int i = 0; i < 5; ++i) file.write("group/" + std::to_string(i), tensor);
        file.close();
        const auto again = Hdf5File::open(path);
        try {
          again.read("none");
        } catch (const Error& error) {
          good[t] += std::strstr(error.what(), "has no 'none'") != nullptr;
        }
        good[t] += equal(again.read("group/3"), tensor);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(good.size(), 10));
}

TEST(WriteAtomically, ReplacesAsAWhole) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  write_atomically(path, [&](const std::string& temporary) {
    write_file(temporary, "first");
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_EQ(std::filesystem::path(temporary).parent_path(), std::filesystem::path(path).parent_path());
  });
  EXPECT_EQ(read_file(path), "first");
  EXPECT_ERROR(write_atomically(path,
                                [&](const std::string& temporary) {
                                  write_file(temporary, "half of");
                                  fail(Error::Kind::Value, "no more");
                                }),
               Value, "no more");
  EXPECT_EQ(read_file(path), "first");
  EXPECT_ERROR(write_atomically(path, [](const std::string&) {}), File, "No such file");  // wrote nothing
  EXPECT_EQ(read_file(path), "first");
  // A link stays a link.
  std::filesystem::create_symlink(path, folder / "link");
  write_atomically(folder / "link", [&](const std::string& temporary) { write_file(temporary, "second"); });
  EXPECT_EQ(read_file(path), "second");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(folder.entries(), 2);

  const auto never = [](const std::string&) { ADD_FAILURE() << "must not be called"; };
  EXPECT_ERROR(write_atomically(folder / "none/file", never), File, "there is no folder");
  EXPECT_ERROR(write_atomically(folder / "", never), File, "is not a regular file");
  EXPECT_ERROR(write_atomically("/dev/null", never), File, "/dev/null: is not a regular file");
}

}  // namespace
}  // namespace torus
