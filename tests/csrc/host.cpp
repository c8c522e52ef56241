// The host bodies of csrc/'s loads, conversions and stores, and the sums, as plain functions for ctypes.
#include <type_traits>

#include "flashnorm/codec8.cuh"
#include "flashnorm/vec.cuh"

using namespace flashnorm;

namespace {

constexpr int kWide = 16;

template <class T>
void widen_all(const void* from, float* to, int64_t count, int scalar) {
  const T* in = static_cast<const T*>(from);
  for (int64_t i = 0; i + kWide <= count; i += kWide) {
    if (scalar) {
      for (int j = 0; j < kWide; ++j) {
        if constexpr (std::is_same_v<T, bf16>) to[i + j] = soft::widen_bf16(in[i + j].bits);
        if constexpr (std::is_same_v<T, f16>) to[i + j] = soft::widen_f16(in[i + j].bits);
      }
      continue;
    }
    Pack<T, kWide> pack;
    RowRef<const T>{in, 0, 0}.load(pack, At<Whole>{{0, 0}, int(i), {}});
    float v[kWide];
    widen(v, pack);
    std::memcpy(to + i, v, sizeof(v));
  }
}

template <class T>
void narrow_all(const float* from, void* to, int64_t count, int scalar) {
  T* out = static_cast<T*>(to);
  for (int64_t i = 0; i + kWide <= count; i += kWide) {
    if (scalar) {
      for (int j = 0; j < kWide; ++j) {
        if constexpr (std::is_same_v<T, bf16>) out[i + j].bits = uint16_t(soft::narrow_bf16(from[i + j]));
        if constexpr (std::is_same_v<T, f16>) out[i + j].bits = uint16_t(soft::narrow_f16(from[i + j]));
      }
      continue;
    }
    float v[kWide];
    std::memcpy(v, from + i, sizeof(v));
    Pack<T, kWide> pack;
    narrow(pack, v);
    RowRef<T>{out, 0, 0}.store(pack, At<Whole>{{0, 0}, int(i), {}});
  }
}

template <class T>
void narrow_codes(const float* from, void* to, int64_t count, int scalar) {
  T* out = static_cast<T*>(to);
  for (int64_t i = 0; i + kWide <= count; i += kWide) {
    if (scalar) {
      for (int j = 0; j < kWide; ++j) {
        const uint8_t code = detail::soft_code(from[i + j], T{});
        std::memcpy(out + i + j, &code, 1);
      }
      continue;
    }
    float v[kWide];
    std::memcpy(v, from + i, sizeof(v));
    Pack<T, kWide> pack;
    narrow(pack, v);
    RowRef<T>{out, 0, 0}.store(pack, At<Whole>{{0, 0}, int(i), {}});
  }
}

template <class T>
void widen_codes(const uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = soft::Float8<T>::widen(from[i]);
}

void widen_bytes(const int8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i + kWide <= count; i += kWide) {
    Pack<int8_t, kWide> pack;
    RowRef<const int8_t>{from, 0, 0}.load(pack, At<Whole>{{0, 0}, int(i), {}});
    float v[kWide];
    widen(v, pack);
    std::memcpy(to + i, v, sizeof(v));
  }
}

// Copies `count` of 8 elements through a ragged load and a ragged store.
template <class T>
void copy_ragged(const void* from, void* to, int count) {
  const At<Ragged> at{{0, 0}, 0, {count}};
  Pack<T, kGroup> pack;
  RowRef<const T>{static_cast<const T*>(from), 0, 0}.load(pack, at);
  RowRef<T>{static_cast<T*>(to), 0, 0}.store(pack, at);
}

}  // namespace

extern "C" {
void widen_bf16(const void* from, float* to, int64_t n, int scalar) { widen_all<bf16>(from, to, n, scalar); }
void widen_f16(const void* from, float* to, int64_t n, int scalar) { widen_all<f16>(from, to, n, scalar); }
void widen_f32(const void* from, float* to, int64_t n, int) { widen_all<float>(from, to, n, 0); }
void narrow_bf16(const float* from, void* to, int64_t n, int scalar) { narrow_all<bf16>(from, to, n, scalar); }
void narrow_f16(const float* from, void* to, int64_t n, int scalar) { narrow_all<f16>(from, to, n, scalar); }
void narrow_f32(const float* from, void* to, int64_t n, int) { narrow_all<float>(from, to, n, 0); }
void narrow_e4m3(const float* from, void* to, int64_t n, int scalar) { narrow_codes<e4m3>(from, to, n, scalar); }
void narrow_e5m2(const float* from, void* to, int64_t n, int scalar) { narrow_codes<e5m2>(from, to, n, scalar); }
void narrow_int8(const float* from, void* to, int64_t n, int scalar) { narrow_codes<int8_t>(from, to, n, scalar); }
void widen_e4m3(const uint8_t* from, float* to, int64_t n, int) { widen_codes<e4m3>(from, to, n); }
void widen_e5m2(const uint8_t* from, float* to, int64_t n, int) { widen_codes<e5m2>(from, to, n); }
void widen_int8(const int8_t* from, float* to, int64_t n, int) { widen_bytes(from, to, n); }
void copy_8(const void* from, void* to, int count) { copy_ragged<int8_t>(from, to, count); }
void copy_16(const void* from, void* to, int count) { copy_ragged<bf16>(from, to, count); }
void copy_32(const void* from, void* to, int count) { copy_ragged<float>(from, to, count); }
}
