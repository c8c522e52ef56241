// The intrinsics of the processor that is compiled for.
//
// GCC's <immintrin.h> declares those of every x86 processor, which takes it about as long as the rest of a unit. Where
// 8 floats a vector are the widest there are, the parts that have them are read alone, in the versions of GCC whose
// parts are known to ask for no more than the macro below.
#pragma once

#if defined(__x86_64__)
#if defined(__GNUC__) && __GNUC__ < 16 && !defined(__clang__) && !defined(_IMMINTRIN_H_INCLUDED) && \
    defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#include <smmintrin.h>
#define _IMMINTRIN_H_INCLUDED
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#undef _IMMINTRIN_H_INCLUDED
#else
#include <immintrin.h>
#endif
#endif
