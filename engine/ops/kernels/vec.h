// Vector registers in the compiler's own vector types. Intrinsics are used only for conversions and products that
// compilers do not generate reliably.
//
// All data moves in 32-bit words: one float, or two adjacent bf16. Packing, transposing and the loops of a product are
// the same for both types; only `factors` and `dot` differ.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace cpd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

struct bf16 {
  uint16_t bits;
};

template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

// True if the processor has an instruction for `dot`.
template <typename T>
#ifdef __AVX512BF16__
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = std::is_same_v<T, float>;
#endif

// Uninitialised memory, aligned for vectors.
class Buffer {
 public:
  explicit Buffer(int64_t floats) : data_(new (std::align_val_t(64)) float[floats]) {}
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { operator delete[](data, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> data_;
};

#define CPD_INLINE inline __attribute__((always_inline))

CPD_INLINE Floats splat(float x) { return x - Floats{}; }
CPD_INLINE Words splat(uint32_t x) { return x - Words{}; }

CPD_INLINE Words load_words(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// Loads before this come before those after it. Compilers load in any order; the processor prefetches best what is read
// in ascending order.
CPD_INLINE void keep_order() { asm volatile("" ::: "memory"); }

CPD_INLINE void store_words(void* to, Words words) { std::memcpy(to, &words, sizeof words); }

CPD_INLINE void store_words(void* to, Words words, int64_t count) {
  std::memcpy(to, &words, count >= kLanes ? sizeof words : count * 4);
}

CPD_INLINE Words load_words(const void* from, int64_t count) {
  if (count >= kLanes) return load_words(from);
  Words words{};
  std::memcpy(&words, from, count * 4);
  return words;
}

CPD_INLINE Floats widen(Halves halves) {
#ifdef __AVX512F__
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#else
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Rounds to the nearest bf16, ties to even, in the upper half of each word.
CPD_INLINE Words round_words(Floats x) {
  Words bits = (Words)x;
  Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (x == x ? rounded : bits | 0x400000u) & 0xffff0000u;
}

CPD_INLINE Halves narrow(Floats x) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  return __builtin_convertvector(round_words(x) >> 16, Halves);
#endif
}

CPD_INLINE Floats load(const float* from) { return (Floats)load_words(from); }
CPD_INLINE Floats load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return widen(halves);
}
CPD_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
CPD_INLINE void store(bf16* to, Floats x) {
  Halves halves = narrow(x);
  std::memcpy(to, &halves, sizeof halves);
}

// Only the first `count` lanes; the others load as zero and are not stored.
template <typename T>
CPD_INLINE Floats load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}
template <typename T>
CPD_INLINE void store(T* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(to, lanes, count * sizeof(T));
}

template <typename T>
CPD_INLINE Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, bf16>) return (Floats)round_words(x);
  return x;
}

// Type in which elements are multiplied. Without an instruction for bf16 dot products they become float32: the left
// ones, each used many times, in a copy of a few rows; the right ones in registers.
template <typename T>
using Factor = std::conditional_t<kHasDot<T>, T, float>;
template <typename T>
constexpr int kFactorsPerWord = kPerWord<T> / kPerWord<Factor<T>>;

// Vector `index` of the factors in vectors of words: the first elements of the first vector's words, then their second
// elements, and so on.
template <typename T>
CPD_INLINE Words factors(const Words* words, int index) {
  if constexpr (kFactorsPerWord<T> == 1) {
    return words[index];
  } else {
    const Words word = words[index / 2];
    return index % 2 ? word & 0xffff0000u : word << 16;
  }
}

// sum + a · b, rounded once if the processor can. Compilers would do so in some loops and not in others, and a row's
// bits would depend on the number of rows.
CPD_INLINE Floats multiply_add(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

// sum + a · b in each lane: one product per word for float, two for bf16, added in float32.
template <typename T>
CPD_INLINE Floats dot(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, bf16>) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add(sum, (Floats)a, (Floats)b);
}

template <typename T>
CPD_INLINE void copy_factors(Factor<T>* to, const T* from, int64_t count) {
  if constexpr (kHasDot<T>) {
    std::memcpy(to, from, count * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i), count - i);
  }
}

// Words of a factor of `dot4`.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int kWordsPerDot4 = 1;
#else
constexpr int kWordsPerDot4 = 2;
#endif

// Makes a factor of four signed bytes: the bytes or, for processors that multiply 16-bit integers, the first and the
// third, then the others.
CPD_INLINE void store_factor(uint32_t* to, const int8_t* bytes) {
  if constexpr (kWordsPerDot4 == 1) {
    std::memcpy(to, bytes, 4);
  } else {
    for (int i = 0; i < 2; ++i) to[i] = uint16_t(bytes[i]) | uint32_t(uint16_t(bytes[i + 2])) << 16;
  }
}

// sum + a · b in each lane: two products of signed 16-bit integers per word.
CPD_INLINE Ints dot2(Ints sum, Words a, Words b) {
#if defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// sum + the four products of a word's unsigned bytes and the same factor, in each lane.
CPD_INLINE Ints dot4(Ints sum, Words a, const uint32_t* factor) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)splat(*factor));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)splat(*factor));
#else
  return dot2(dot2(sum, a & 0x00ff00ffu, splat(factor[0])), a >> 8 & 0x00ff00ffu, splat(factor[1]));
#endif
}

// The lowest byte of each lane.
CPD_INLINE void store_bytes(int8_t* to, Ints x) {
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Finite numbers in float16.
CPD_INLINE Floats load_float16(const void* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  const Words words = __builtin_convertvector(halves, Words);
  const Floats size = (Floats)((words & 0x7fffu) << 13) * 0x1p112f;
  return (Floats)((Words)size | (words & 0x8000u) << 16);
#endif
}

template <typename A>
CPD_INLINE A larger(A a, A b) {
  return a > b ? a : b;
}

// True if the result of a comparison is true in any lane.
CPD_INLINE bool any(Ints is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)is_true);
#else
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= is_true[lane];
  return bits;
#endif
}

// e^x to 2 units in the last place; e^0 is exactly 1, and everything below -87 is exactly 0.
CPD_INLINE Floats exp(Floats x) {
  const Floats low = splat(-87.0f), high = splat(88.0f);
  Floats clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  const float shift = 12582912.0f;  // 1.5 · 2^23: adding it leaves the rounded integer in the low bits
  Floats shifted = clamped * 1.44269504088896341f + shift;
  Floats n = shifted - shift;
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Words exponent = ((Words)shifted - 0x4b400000u + 127) << 23;
  Floats result = p * (Floats)exponent;
  return x < low ? Floats{} : result;
}

CPD_INLINE float exp(float x) { return exp(splat(x))[0]; }

#ifdef __clang__
#define CPD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CPD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

template <int kStep, int... kLane>
CPD_INLINE Words rotate(Words x, std::integer_sequence<int, kLane...>) {
  return CPD_SHUFFLE(x, x, (kLane ^ kStep)...);
}

// Combines all lanes, always in the same order.
template <int kStep = kLanes / 2, typename Combine>
CPD_INLINE float reduce(Floats x, Combine combine) {
  if constexpr (kStep == 0) {
    return x[0];
  } else {
    Words other = rotate<kStep>((Words)x, std::make_integer_sequence<int, kLanes>());
    return reduce<kStep / 2>(combine(x, (Floats)other), combine);
  }
}
CPD_INLINE float sum(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}
CPD_INLINE float largest(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return larger(a, b); });
}

template <int kStep, int... kLane>
CPD_INLINE void exchange(Words& a, Words& b, std::integer_sequence<int, kLane...>) {
  Words low = CPD_SHUFFLE(a, b, (kLane & kStep ? kLane - kStep + kLanes : kLane)...);
  Words high = CPD_SHUFFLE(a, b, (kLane & kStep ? kLane + kLanes : kLane + kStep)...);
  a = low;
  b = high;
}

// Transposes a square of kLanes x kLanes words, one register per row, by swapping smaller and smaller blocks.
template <int kStep = kLanes / 2>
CPD_INLINE void transpose(Words (&rows)[kLanes]) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (!(i & kStep)) exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kLanes>());
    transpose<kStep / 2>(rows);
  }
}

}  // namespace cpd
