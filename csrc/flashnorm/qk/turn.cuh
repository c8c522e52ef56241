// Sine and cosine of a position times a frequency, with the same bits on the host and on the device.
//
// No libm takes part: the compilers' own differ, and the device's fast ones are wrong by the angle's last bits. The
// frequency comes as two floats, in quarter turns, so that taking whole quarters away is exact.
#pragma once

#include "../fp.cuh"

namespace flashnorm {

struct Frequency {
  float hi;
  float lo;
};

struct Turn {
  float sin;
  float cos;
};

// The steps are those that flashnorm/program/qk.py lists. Within 1e-7, for |position * frequency| < 2^22 quarters.
FN_HOST_DEVICE Turn turn_of(float position, Frequency frequency) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are a rounded integer
  const float product = fp::mul(position, frequency.hi);
  const float rest = fp::fma(position, frequency.lo, fp::fma(position, frequency.hi, -product));
  const float shifted = fp::add(product, kMagic);
  const float y = fp::add(fp::sub(product, fp::sub(shifted, kMagic)), rest);
  const float z = fp::mul(y, y);
  float s = fp::fma(z, -0x1.2ef846p-8f, 0x1.4668e6p-4f);
  s = fp::fma(z, s, -0x1.4abbe6p-1f);
  s = fp::fma(z, s, 0x1.921fb6p+0f);
  s = fp::mul(y, s);
  float c = fp::fma(z, 0x1.d47e82p-11f, -0x1.55b148p-6f);
  c = fp::fma(z, c, 0x1.03c1aep-2f);
  c = fp::fma(z, c, -0x1.3bd3ccp+0f);
  c = fp::fma(z, c, 1.0f);
  const uint32_t quarter = bits_of(shifted);
  const bool odd = quarter & 1u;
  const uint32_t sine = bits_of(odd ? c : s), cosine = bits_of(odd ? s : c);
  return {float_of(sine ^ ((quarter & 2u) << 30)), float_of(cosine ^ (((quarter + 1u) & 2u) << 30))};
}

}  // namespace flashnorm
