// The CPU row loop without TVM-FFI or Python: conversions against their scalar form, and one hash over the results
// for many widths. Whatever the compiler, the vector width and the machine, the hash must be the same.
#include <cstdio>
#include <type_traits>
#include <vector>

#include "flashnorm/cpu/row_forward.h"

using namespace flashnorm;

struct Options {
  using Input = bf16;
  static constexpr float kOffset = 1.0f;
  static constexpr bool kRoundNorm = true;
  static constexpr bool kRounded = false;
};

template <class X, class Weight, class Dst>
struct Norm {
  LoadRow<Options, X> load;
  Rms<Options> stats;
  Chain<Affine<Options, Weight>> maps;
  Chain<SaveRstd<Options, float>> saves;
  Cast<Options, Dst> store;
};

template <class X, class Residual, class Weight>
struct AddNorm {
  AddResidual<Options, X, Residual> load;
  Rms<Options> stats;
  Chain<Affine<Options, Weight>> maps;
  Chain<> saves;
  Cast<Options, X> store;
};

uint64_t state = 88172645463325252ull;
uint32_t random_bits() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 16);
}

template <class T>
T make(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return {uint16_t(soft::narrow_bf16(v))};
  } else {
    return {uint16_t(soft::narrow_f16(v))};
  }
}

enum Kind { kOrdinary, kSubnormal, kHuge, kSpikes, kKinds };

template <class T>
std::vector<T> fill(int count, int kind) {
  std::vector<T> values(count);
  for (T& value : values) {
    float v = (float(random_bits() & 0xFFFFFF) / float(1 << 23) - 1.0f) * 3.0f;
    if (kind == kSubnormal) v *= 1e-38f;
    if (kind == kHuge) v *= 1e20f;
    if (kind == kSpikes && random_bits() % 64 == 0) v *= 1000.0f;
    value = make<T>(v);
  }
  return values;
}

template <class T>
bool is_nan(T v) {
  if constexpr (std::is_same_v<T, float>) {
    return v != v;
  } else {
    return (v.bits & 0x7FFF) > (std::is_same_v<T, bf16> ? 0x7F80 : 0x7C00);
  }
}

uint64_t total = 1469598103934665603ull;
template <class T>
void hash(const std::vector<T>& values) {
  for (const T& value : values) {
    uint32_t bits = 0x7FFFu;  // every NaN counts as the same
    if (!is_nan(value)) std::memcpy(&bits, &value, sizeof(T));
    total = (total ^ bits) * 1099511628211ull;
  }
}

void hash_bytes(const std::vector<uint8_t>& bytes) {
  for (const uint8_t byte : bytes) total = (total ^ byte) * 1099511628211ull;
}

constexpr int kRows = 3;
int failures = 0;

template <class X, class Weight, class Dst>
void norm(int h, int kind) {
  const auto x = fill<X>(kRows * h, kind);
  const auto weight = fill<Weight>(h, kOrdinary);
  std::vector<Dst> out(kRows * h), streamed(kRows * h);
  std::vector<float> rstd(kRows);
  Norm<X, Weight, Dst> program{
      {{x.data(), 0, h}}, {1e-6f}, {{{weight.data(), 0, 0}}, {}}, {{{rstd.data(), 0, 1}}, {}}, {{out.data(), 0, h}}};
  cpu::forward_rows<Whole>(program, h, kRows, kRows, 0, kRows);
  hash(out), hash(rstd);
  program.store.dst.ptr = streamed.data();
  cpu::forward_rows<cpu::Stream>(program, h, kRows, kRows, 0, kRows);
  if (std::memcmp(out.data(), streamed.data(), out.size() * sizeof(Dst)) != 0) {
    std::printf("streamed stores differ: h = %d\n", h), ++failures;
  }
}

template <class X, class Residual, class Weight>
void add_norm(int h, int kind) {
  auto x = fill<X>(kRows * h, kind);
  auto residual = fill<Residual>(kRows * h, kind);
  const auto weight = fill<Weight>(h, kOrdinary);
  const AddNorm<X, Residual, Weight> program{
      {{x.data(), 0, h}, {residual.data(), 0, h}, {}}, {1e-6f}, {{{weight.data(), 0, 0}}, {}}, {}, {{x.data(), 0, h}}};
  cpu::forward_rows<Whole>(program, h, kRows, kRows, 0, kRows);
  hash(x), hash(residual);
}

// The plain sum, and its sign where every element is -0: +0 as soon as one lane or element is missing.
void sum(int h, int kind) {
  auto x = fill<float>(h, kind);
  const LoadRow<Options, float> load{{x.data(), 0, 0}};
  const cpu::RowSums<LoadRow<Options, float>> sums(load, {0, 0}, h);
  hash(std::vector<float>{sums.sum(), sums.sum_squares()});
  for (float& v : x) v = -0.0f;
  const int groups = h / 8;
  const bool full = h <= 8192 ? h % 8 == 0 && (groups & (groups - 1)) == 0 : h % 8192 == 0;
  if (bits_of(sums.sum()) != (full ? 0x80000000u : 0u)) std::printf("sign of zero: h = %d\n", h), ++failures;
}

// Every sign and exponent, every 16-bit number, and the bits around every boundary of rounding.
template <class T, class Narrow, class Widen>
void conversions(Narrow narrow_one, Widen widen_one) {
  constexpr int N = cpu::kStep;
  for (uint32_t low : {0x0u, 0x1u, 0xFFFu, 0x1000u, 0x1001u, 0x1FFFu, 0x2000u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
    for (uint32_t high = 0; high < 0x10000u; high += N) {
      float v[N], wide[N];
      uint16_t got[N], numbers[N];
      for (int i = 0; i < N; ++i) v[i] = float_of((high + i) << 16 | low), numbers[i] = uint16_t(high + i);
      Pack<T, N> pack, all;
      narrow(pack, v);
      std::memcpy(got, pack.words, sizeof(got));
      std::memcpy(all.words, numbers, sizeof(numbers));
      widen(wide, all);
      for (int i = 0; i < N; ++i) {
        const T value{got[i]};
        const float expected = widen_one(numbers[i]);
        const bool narrowed = v[i] != v[i] ? is_nan(value) : got[i] == narrow_one(v[i]);
        const bool widened = expected != expected ? wide[i] != wide[i] : bits_of(wide[i]) == bits_of(expected);
        if (!narrowed) std::printf("narrow(%08x) = %04x\n", bits_of(v[i]), got[i]), ++failures;
        if (!widened) std::printf("widen(%04x) = %08x\n", numbers[i], bits_of(wide[i])), ++failures;
      }
      if (failures > 20) return;
    }
  }
}

// The same of 8-bit codes, whose only boundaries lie in the upper half.
template <class T>
void codes() {
  constexpr int N = cpu::kStep;
  for (uint32_t low : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
    for (uint32_t high = 0; high < 0x10000u; high += N) {
      float v[N];
      uint8_t got[N];
      for (int i = 0; i < N; ++i) v[i] = float_of((high + i) << 16 | low);
      Pack<T, N> pack;
      narrow(pack, v);
      std::memcpy(got, pack.words, sizeof(got));
      for (int i = 0; i < N; ++i) {
        if (got[i] == detail::soft_code(v[i], T{})) continue;
        std::printf("code of %08x = %02x\n", bits_of(v[i]), got[i]), ++failures;
      }
      if (failures > 20) return;
    }
  }
}

void widened_bytes() {
  constexpr int N = cpu::kStep;
  for (int first = -128; first < 128; first += N) {
    int8_t bytes[N];
    float v[N];
    for (int i = 0; i < N; ++i) bytes[i] = int8_t(first + i);
    Pack<int8_t, N> pack;
    std::memcpy(pack.words, bytes, sizeof(bytes));
    widen(v, pack);
    for (int i = 0; i < N; ++i) {
      if (v[i] != float(first + i)) std::printf("float(%d) = %g\n", first + i, v[i]), ++failures;
    }
  }
}

// LayerNorm, and codes by block of a row, by block of 128, and by one scale.
template <class Scale, int kBlock_>
struct CodeOptions : Options {
  static constexpr int kBlock = kBlock_;
  static constexpr float kFloor = 1e-10f;
  static constexpr bool kRatio = false, kUe8m0 = sizeof(Scale) == 1, kPacked = false, kSide = true;
  static constexpr bool kOcp = false, kFp4 = false;
  static constexpr Cap kCap = Cap::kValue;
  static constexpr Layout kLayout = Layout::kRows;
};

template <class X, class Dst, class Scale, int kBlock>
struct Codes {
  using Store = QuantBlocks<CodeOptions<Scale, kBlock>, Dst, Scale, X>;
  LoadRow<Options, X> load;
  MeanVar<Options> stats;
  Chain<AffineBias<Options, float, float>, Round<Options>> maps;
  Chain<SaveRstd<Options, float>> saves;
  Store store;
};

template <class X, class Dst, class Scale, int kBlock>
void layer_norm_codes(int h, int kind) {
  using Program = Codes<X, Dst, Scale, kBlock>;
  const auto x = fill<X>(kRows * h, kind);
  const auto weight = fill<float>(h, kOrdinary), bias = fill<float>(h, kOrdinary);
  const int columns = Program::Store::columns(h), padded = kRows + 2;
  std::vector<uint8_t> out(kRows * h);
  std::vector<X> side(kRows * h);
  std::vector<Scale> scales(padded * columns, Scale(77));
  std::vector<float> rstd(kRows);
  const BlocksRef<Scale> blocks{scales.data(), 1, padded, padded, columns, h};
  const Program program{{{x.data(), 0, h}},
                        {1e-6f},
                        {{{weight.data(), 0, 0}, {bias.data(), 0, 0}}, {}},
                        {{{rstd.data(), 0, 1}}, {}},
                        {{reinterpret_cast<Dst*>(out.data()), 0, h}, blocks, RowRef<X>{side.data(), 0, h}, 1.5f}};
  cpu::forward_rows<Whole>(program, h, kRows, kRows, 0, padded);
  hash_bytes(out);
  if constexpr (std::is_same_v<Scale, float>) {
    hash(scales);
  } else {
    hash_bytes(scales);
  }
  for (int i = 0; i < columns; ++i) {
    for (int row = kRows; row < padded; ++row) {
      if (scales[i * padded + row] != 0) std::printf("padding of h = %d\n", h), ++failures;
    }
  }
  hash(side), hash(rstd);
}

int main() {
  codes<e4m3>(), codes<e5m2>(), codes<int8_t>(), widened_bytes();
  conversions<bf16>(soft::narrow_bf16, soft::widen_bf16);
  conversions<f16>(soft::narrow_f16, soft::widen_f16);
  for (int h : {1,   2,   3,   7,   8,    9,    15,   16,   17,   31,   32,   33,    63,    64,  65, 111,
                127, 128, 129, 255, 256,  257,  500,  512,  576,  1023, 1024, 4096,  4097,  8191, 8192, 8193,
                8200, 16384, 65537}) {
    for (int kind = 0; kind < kKinds; ++kind) {
      norm<bf16, bf16, bf16>(h, kind);
      norm<float, f16, f16>(h, kind);
      add_norm<f16, float, bf16>(h, kind);
      sum(h, kind);
      if (h % 3 != 0) continue;
      layer_norm_codes<bf16, e4m3, float, 128>(h, kind);
      layer_norm_codes<f16, e5m2, uint8_t, 128>(h, kind);
      layer_norm_codes<float, int8_t, float, 0>(h, kind);
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(total));
  return failures != 0;
}
