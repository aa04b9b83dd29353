// The map of documents whose lengths are in a tensor of the device, made by the device: nothing waits for the
// lengths, and a captured step makes it anew at each replay.
#include <algorithm>

#include "torus/ops/attention/cuda_map.h"

namespace torus::gpu {

namespace {

using torus::detail::Atom;
using torus::detail::MaskRule;
using torus::detail::PackedDocuments;
using torus::detail::tile_size;
using torus::detail::Visit;

constexpr int words_an_atom = 128;

// The maps of packed documents, one a batch element, `bytes` apart. Their sizes do not depend on the lengths,
// so that a captured step can make them anew. A tile visits the tokens of its documents before it, in it, and
// after it: always three visits, of which some are of nothing. Where it lies within one document, whole ones;
// else of what is before only the rows of its first document see any, of what is after only those of its
// last: three atoms.
struct PackedMaps {
  std::byte* memory;
  int64_t bytes;
  int64_t maps, tokens, tiles, documents;
  bool causal;
  // Places within a map; of the two sides, where there are two.
  int64_t starts, first_visit[2], visits[2], atom_ids[2], atoms, fragments;

  template <class T>
  __device__ T* at(int64_t map, int64_t place) const {
    return reinterpret_cast<T*>(memory + map * bytes + place);
  }
  __device__ MapView* views() const { return at<MapView>(maps, 0); }
  // A tile that is not within one document ends its first one: atoms are numbered by whichever are fewer.
  __host__ __device__ int64_t slots() const { return documents < tiles ? documents : tiles; }
};

// Of each map: atom `side` is causal within a document, then three a slot and side.
__device__ int32_t atom_id(int64_t slot, int side, int which) {
  return static_cast<int32_t>(2 + 6 * slot + 3 * side + which);
}

PackedMaps plan(const PackedDocuments& documents, int64_t tokens) {
  PackedMaps plan{};
  plan.maps = documents.per_batch() ? documents.lengths.size(0) : 1;
  plan.tokens = tokens, plan.tiles = (tokens + tile_size - 1) / tile_size;
  plan.documents = documents.documents();
  plan.causal = documents.causal;
  const auto reserve = [&](int64_t count, size_t size) {
    const int64_t place = plan.bytes;
    plan.bytes += (count * static_cast<int64_t>(size) + 127) / 128 * 128;
    return place;
  };
  plan.starts = reserve(plan.documents + 1, sizeof(int64_t));
  for (int side = 0; side < 2; ++side) {
    plan.first_visit[side] = reserve(plan.tiles + 1, sizeof(int64_t));
    plan.visits[side] = reserve(3 * plan.tiles, sizeof(Visit));
    plan.atom_ids[side] = reserve(3 * plan.tiles, sizeof(int32_t));
  }
  const int64_t atoms = 2 + 6 * plan.slots();
  plan.atoms = reserve(atoms, sizeof(Atom));
  plan.fragments = reserve(atoms, words_an_atom * sizeof(uint32_t));
  return plan;
}

// A warp a map. Lengths that cannot be are reported, and cut to what fits.
template <class Int>
__global__ void find_starts(PackedMaps maps, const Int* lengths, Fault* slot, int length_code, int sum_code) {
  const int64_t map = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  int64_t* const starts = maps.at<int64_t>(map, maps.starts);
  if (lane == 0) starts[0] = 0;
  int64_t total = 0;
  for (int64_t first = 0; first < maps.documents; first += 32) {
    const int64_t i = first + lane;
    int64_t length = i < maps.documents ? static_cast<int64_t>(lengths[map * maps.documents + i]) : 0;
    if (length < 0 || length > maps.tokens) report(slot, length_code, length, maps.tokens + 1);
    length = min(max(length, int64_t{0}), maps.tokens);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t before = __shfl_up_sync(0xffffffffu, length, step);
      if (lane >= step) length += before;
    }
    if (i < maps.documents) starts[i + 1] = min(total + length, maps.tokens);
    total += __shfl_sync(0xffffffffu, length, 31);
  }
  if (lane == 0 && total > maps.tokens) report(slot, sum_code, total, maps.tokens + 1);
}

SideView __device__ packed_side(const PackedMaps& maps, int64_t map, int side) {
  SideView view{};
  view.tiles = maps.tiles, view.owners = maps.tokens, view.others = maps.tokens;
  view.first_visit = maps.at<int64_t>(map, maps.first_visit[side]);
  view.visits = maps.at<Visit>(map, maps.visits[side]);
  view.atom_ids = maps.at<int32_t>(map, maps.atom_ids[side]);
  return view;
}

// A block of threads for each tile of each side (0: queries own it) of each map.
constexpr int packed_threads = 128;
__global__ void __launch_bounds__(packed_threads) visit_documents(PackedMaps maps) {
  __shared__ int32_t document[tile_size];  // of the tile's tokens, -1: none
  __shared__ uint64_t words[3][tile_size];
  const int thread = static_cast<int>(threadIdx.x), side = blockIdx.x % 2;
  const int64_t tile = blockIdx.x / 2 % maps.tiles, map = blockIdx.x / 2 / maps.tiles;
  const int64_t* const starts = maps.at<int64_t>(map, maps.starts);
  const int64_t begin = tile * tile_size;
  const auto real =
      static_cast<int>(min(max(starts[maps.documents] - begin, int64_t{0}), int64_t{tile_size}));
  if (thread < tile_size) {
    int32_t found = -1;
    if (thread < real) {
      int64_t low = 0, high = maps.documents;  // starts[low] <= the token < starts[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (starts[middle] <= begin + thread ? low : high) = middle;
      }
      found = static_cast<int32_t>(low);
    }
    document[thread] = found;
  }
  __syncthreads();
  const int32_t first = document[0], last = real > 0 ? document[real - 1] : -1;
  const bool whole = real == tile_size && first == last, queries_own = side == 0;
  const int64_t end = begin + real, from = real > 0 ? starts[first] : begin,
                to = real > 0 ? starts[last + 1] : begin;
  const int64_t before = queries_own || !maps.causal ? begin - from : 0,
                after = !queries_own || !maps.causal ? to - end : 0;
  const int64_t slot = maps.documents < maps.tiles ? first : tile;

  // Ids of what is before and after lie where its tokens do: of no two tiles that need any in the same place.
  int32_t* const ids = maps.at<int32_t>(map, maps.atom_ids[side]);
  if (!whole) {
    if (before > 0)
      for (int64_t i = from / tile_size + thread; i < tile; i += packed_threads)
        ids[i] = atom_id(slot, side, 0);
    if (after > 0)
      for (int64_t i = tile + 1 + thread; i * tile_size < to; i += packed_threads)
        ids[maps.tiles + i] = atom_id(slot, side, 2);
  }
  if (thread == 0) {
    using Kind = Visit::Kind;
    ids[2 * maps.tiles + tile] = whole ? side : atom_id(slot, side, 1);
    Visit* const visits = maps.at<Visit>(map, maps.visits[side]) + 3 * tile;
    if (whole && !maps.causal) {
      visits[0] = {Kind::interval, from, to - from, -1};
      visits[1] = visits[2] = {Kind::interval, to, 0, -1};
    } else {
      visits[0] = {whole ? Kind::interval : Kind::run, from, before, whole ? -1 : from / tile_size};
      visits[1] = {Kind::run, begin, real, 2 * maps.tiles + tile};
      visits[2] = {whole ? Kind::interval : Kind::run, end, after, whole ? -1 : maps.tiles + tile + 1};
    }
    int64_t* const first_visit = maps.at<int64_t>(map, maps.first_visit[side]);
    first_visit[tile] = 3 * tile;
    if (tile == maps.tiles - 1) first_visit[maps.tiles] = 3 * maps.tiles;
    if (tile == 0 && queries_own)
      maps.views()[map] = {packed_side(maps, map, 0), packed_side(maps, map, 1),
                           maps.at<uint64_t>(map, maps.atoms), maps.at<uint32_t>(map, maps.fragments)};
  }

  const auto causal_word = [&](int j) {  // the owners that see other j of the same tile
    return !maps.causal  ? ~uint64_t{0}
           : queries_own ? ~uint64_t{0} << j
                         : ~uint64_t{0} >> (tile_size - 1 - j);
  };
  const auto write = [&](int32_t id, int count) {  // the first `count` of `words`, as atoms from `id` on
    __syncthreads();
    uint64_t* const atoms = maps.at<uint64_t>(map, maps.atoms) + int64_t{id} * tile_size;
    uint32_t* const fragments = maps.at<uint32_t>(map, maps.fragments) + int64_t{id} * words_an_atom;
    for (int a = 0; a < count; ++a) {
      if (thread < tile_size) atoms[a * tile_size + thread] = words[a][thread];
      fragments[a * words_an_atom + thread] = fragment_word(words[a], static_cast<uint32_t>(thread));
    }
    __syncthreads();
  };
  static_assert(words_an_atom == packed_threads);
  if (!whole && real > 0) {
    if (thread < tile_size) {
      const int32_t mine = document[thread];
      uint64_t of_first = 0, of_last = 0, same = 0;
      for (int i = 0; i < real; ++i) {
        of_first |= uint64_t{document[i] == first} << i;
        of_last |= uint64_t{document[i] == last} << i;
        same |= uint64_t{document[i] == mine} << i;
      }
      words[0][thread] = of_first, words[1][thread] = same & causal_word(thread), words[2][thread] = of_last;
    }
    write(atom_id(slot, side, 0), 3);
  }
  if (maps.causal && tile == 0) {
    if (thread < tile_size) words[0][thread] = causal_word(thread);
    write(side, 1);
  }
}

// The maps of the lengths that a tensor last held when they were made.
struct PackedTable {
  Tensor lengths, memory;
  PackedMaps maps;
  MapTable table = {};
  // Of the lengths, and the capture in which they were made; version 0 never is.
  mutable uint64_t version = ~uint64_t{0}, capture = 0;

  void make(Device device) const {
    if (version == lengths.version() && capture == capture_number()) return;
    const cudaStream_t stream = stream_of(device);
    if (maps.tiles > 0 && maps.maps > 0) {
      const auto start = [&](const auto* first) {
        find_starts<<<static_cast<unsigned>(maps.maps), 32, 0, stream>>>(
            maps, first, fault_slot(device), fault_code("document", "a length of"),
            fault_code("document", "the sum of lengths"));
        check_launch("document");
      };
      lengths.dtype() == i64 ? start(lengths.data<int64_t>()) : start(lengths.data<int32_t>());
      const int64_t blocks = 2 * maps.tiles * maps.maps;
      check(blocks <= 0x7fffffff, Error::Kind::Shape, "[document] expected at most 2^30 tiles, got ",
            blocks / 2);
      visit_documents<<<static_cast<unsigned>(blocks), packed_threads, 0, stream>>>(maps);
      check_launch("document");
    }
    version = lengths.version(), capture = capture_number();
  }
};

std::shared_ptr<const PackedTable> reserve(const PackedDocuments& documents, int64_t tokens, Device device) {
  auto result = std::make_shared<PackedTable>();
  PackedMaps& maps = result->maps;
  maps = plan(documents, tokens);
  result->lengths = documents.lengths;
  const int64_t views = maps.maps * static_cast<int64_t>(sizeof(MapView));
  result->memory = Tensor::empty({maps.maps * maps.bytes + views}, u8, device);
  result->memory.storage()->note_kernel("document");
  maps.memory = reinterpret_cast<std::byte*>(result->memory.mutable_data<uint8_t>());
  result->table.views = reinterpret_cast<const MapView*>(maps.memory + maps.maps * maps.bytes);
  result->table.batch_step = documents.per_batch() ? 1 : 0;
  result->table.query_tiles = result->table.key_tiles = maps.tiles;
  return result;
}

}  // namespace

MapTable document_table(const torus::detail::AttentionProblem& problem) {
  const MaskRule& rule = problem.mask.rule();
  const PackedDocuments& documents = *rule.packed();
  const Device device = problem.q.device();
  const auto found = rule.device_maps({problem.queries(), problem.keys(), 0, 0, device.index}, [&] {
    const auto made = reserve(documents, problem.queries(), device);
    return MaskRule::DeviceMaps{made, made->memory.numel()};
  });
  keep_for_replays(found);
  const auto& packed = *static_cast<const PackedTable*>(found.get());
  packed.make(device);
  return packed.table;
}

}  // namespace torus::gpu
