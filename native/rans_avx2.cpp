// Interleaved rANS with AVX2: four vectors of eight lanes.

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>

#include "rans.hpp"

#define RETAIN_AVX2 __attribute__((target("avx2,popcnt")))
#define RETAIN_INLINE RETAIN_AVX2 inline __attribute__((always_inline))

namespace retain::rans {
namespace {

constexpr std::size_t kVector = 8;
constexpr std::size_t kVectors = kLanes / kVector;

// Permutations by mask: which word each lane that refills takes, and the lanes that spill moved to the vector's end.
struct Permutations {
    alignas(32) std::uint32_t expand[256][kVector];
    alignas(32) std::uint32_t compress[256][kVector];
};

constexpr Permutations permutations() {
    Permutations made{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        unsigned taken = 0;
        for (unsigned lane = 0; lane < kVector; ++lane) {
            made.expand[mask][lane] = taken;
            taken += mask >> lane & 1;
        }
        unsigned at = kVector - taken;
        for (unsigned lane = 0; lane < kVector; ++lane) {
            if (mask >> lane & 1) {
                made.compress[mask][at++] = lane;
            }
        }
    }
    return made;
}

constexpr Permutations kPermutations = permutations();

RETAIN_INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

RETAIN_INLINE unsigned bits_of(__m256i mask) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

struct Bounds {
    __m256i own, low, high;
};

RETAIN_INLINE Bounds bounds_of(const Classes& classes) {
    return {_mm256_set1_epi32(classes.own), _mm256_set1_epi32(classes.low), _mm256_set1_epi32(classes.high)};
}

RETAIN_INLINE __m256i classes_at(const Bounds& bounds, const std::int32_t* shift) {
    return _mm256_min_epi32(_mm256_max_epi32(_mm256_add_epi32(bounds.own, load(shift)), bounds.low), bounds.high);
}

RETAIN_INLINE __m256i refill(Decoder& from, __m256i state) {
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
    const unsigned mask = bits_of(low);
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from.at)));
    const __m256i placed = _mm256_permutevar8x32_epi32(words, load(kPermutations.expand[mask]));
    from.at += 2 * _mm_popcnt_u32(mask);
    return _mm256_blendv_epi8(state, _mm256_or_si256(_mm256_slli_epi32(state, 16), placed), low);
}

RETAIN_INLINE void store(std::int16_t* numbers, __m256i values) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(values, values), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers), _mm256_castsi256_si128(packed));
}

RETAIN_AVX2 bool decode(Decoder& from, const std::uint32_t* tables, Classes classes, std::size_t count,
                        std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    std::size_t i = 0;
    for (; count - i >= kLanes && from.end - from.at >= static_cast<std::ptrdiff_t>(2 * kLanes); i += kLanes) {
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kVectors; ++v) {
            const __m256i state = load(from.state + v * kVector);
            const __m256i slot = _mm256_and_si256(state, _mm256_set1_epi32(kTotal - 1));
            const __m256i table = _mm256_slli_epi32(classes_at(bounds, classes.shift + i + v * kVector), kBits);
            const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables), _mm256_add_epi32(table, slot), 4);
            const __m256i product = _mm256_mullo_epi32(_mm256_srli_epi32(entry, 20), _mm256_srli_epi32(state, kBits));
            const __m256i place = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(kTotal - 1));
            store(numbers + i + v * kVector,
                  _mm256_sub_epi32(_mm256_and_si256(entry, _mm256_set1_epi32(0xFF)), _mm256_set1_epi32(kZero)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(from.state + v * kVector),
                                refill(from, _mm256_add_epi32(product, place)));
        }
    }
    for (; i < count; i += kLanes) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + i};
        if (!decode_step(from, tables, rest, count - i < kLanes ? count - i : kLanes, numbers + i)) {
            return false;
        }
    }
    return true;
}

RETAIN_AVX2 bool refine(Decoder& from, const std::uint32_t* splits, Classes classes, std::size_t count,
                        std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    const __m256i total = _mm256_set1_epi32(kTotal);
    std::size_t i = 0;
    for (; count - i >= kLanes && from.end - from.at >= static_cast<std::ptrdiff_t>(2 * kLanes); i += kLanes) {
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kVectors; ++v) {
            std::int16_t* at = numbers + i + v * kVector;
            const __m256i state = load(from.state + v * kVector);
            const __m256i known = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
            const __m256i context = _mm256_min_epi32(_mm256_abs_epi32(known), _mm256_set1_epi32(kContexts - 1));
            const __m256i own = classes_at(bounds, classes.shift + i + v * kVector);
            const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(own, 2), context);
            const __m256i split = _mm256_i32gather_epi32(reinterpret_cast<const int*>(splits), index, 4);
            const __m256i middle = _mm256_and_si256(split, _mm256_set1_epi32(0xFFFF)), upper = _mm256_srli_epi32(split, 16);
            const __m256i slot = _mm256_and_si256(state, _mm256_set1_epi32(kTotal - 1));
            const __m256i below = _mm256_cmpgt_epi32(middle, slot), not_top = _mm256_cmpgt_epi32(upper, slot);
            const __m256i start = _mm256_andnot_si256(below, _mm256_blendv_epi8(upper, middle, not_top));
            const __m256i stop = _mm256_blendv_epi8(_mm256_blendv_epi8(total, upper, not_top), middle, below);
            const __m256i product = _mm256_mullo_epi32(_mm256_sub_epi32(stop, start), _mm256_srli_epi32(state, kBits));
            // Masks are -1: 1 + below + not_top is the digit.
            const __m256i digit = _mm256_add_epi32(_mm256_set1_epi32(1), _mm256_add_epi32(below, not_top));
            const __m256i sign = _mm256_or_si256(_mm256_srai_epi32(known, 31), _mm256_set1_epi32(1));
            const __m256i thrice = _mm256_add_epi32(known, _mm256_slli_epi32(known, 1));
            store(at, _mm256_add_epi32(thrice, _mm256_sign_epi32(digit, sign)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(from.state + v * kVector),
                                refill(from, _mm256_add_epi32(product, _mm256_sub_epi32(slot, start))));
        }
    }
    for (; i < count; i += kLanes) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + i};
        if (!refine_step(from, splits, rest, count - i < kLanes ? count - i : kLanes, numbers + i)) {
            return false;
        }
    }
    return true;
}

RETAIN_INLINE void put(Encoder& into, std::size_t v, __m256i frequency, __m256i start) {
    __m256i state = load(into.state + v * kVector);
    const __m256i room = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(state, 32 - kBits));
    const unsigned mask = ~bits_of(room) & 0xFF;
    const __m256i low = _mm256_and_si256(state, _mm256_set1_epi32(0xFFFF));
    const __m256i spilt = _mm256_permutevar8x32_epi32(low, load(kPermutations.compress[mask]));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(spilt, spilt), 0x08);
    // All eight words are written, the wanted ones last: what lies below them is written over by what follows.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into.at - 2 * kVector), _mm256_castsi256_si128(packed));
    into.at -= 2 * _mm_popcnt_u32(mask);
    state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, room);
    // The quotient is below 2^20 and its float estimate at most one off; halved, for AVX2 converts signed numbers.
    const __m256 half = _mm256_cvtepi32_ps(_mm256_srli_epi32(state, 1));
    const __m256 ratio = _mm256_div_ps(_mm256_add_ps(half, half), _mm256_cvtepi32_ps(frequency));
    __m256i quotient = _mm256_cvttps_epi32(ratio);
    __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, frequency));
    const __m256i over = _mm256_srai_epi32(rest, 31);
    quotient = _mm256_add_epi32(quotient, over);
    rest = _mm256_add_epi32(rest, _mm256_and_si256(over, frequency));
    const __m256i fits = _mm256_cmpgt_epi32(frequency, rest);
    quotient = _mm256_add_epi32(quotient, _mm256_andnot_si256(fits, _mm256_set1_epi32(1)));
    rest = _mm256_sub_epi32(rest, _mm256_andnot_si256(fits, frequency));
    state = _mm256_add_epi32(_mm256_slli_epi32(quotient, kBits), _mm256_add_epi32(rest, start));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(into.state + v * kVector), state);
}

RETAIN_AVX2 __attribute__((noinline)) void keep_escapes(Encoder& into, const std::int16_t* numbers, unsigned lanes) {
    for (int lane = kVector - 1; lane >= 0; --lane) {
        if (lanes >> lane & 1) {
            into.escapes.push_back(numbers[lane]);
        }
    }
}

RETAIN_AVX2 void encode(Encoder& into, const std::uint32_t* tables, Classes classes, std::size_t count,
                        const std::int16_t* numbers) {
    const std::size_t whole = count / kLanes * kLanes;
    if (whole < count) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + whole};
        kPortable.encode(into, tables, rest, count - whole, numbers + whole);
    }
    const Bounds bounds = bounds_of(classes);
    const __m256i escape = _mm256_set1_epi32(kEscape);
    for (std::size_t i = whole; i > 0; i -= kLanes) {
#pragma GCC unroll 4
        for (std::size_t v = kVectors; v-- > 0;) {
            const std::size_t at = i - kLanes + v * kVector;
            const __m256i number = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + at)));
            const __m256i symbol = _mm256_min_epu32(_mm256_add_epi32(number, _mm256_set1_epi32(kZero)), escape);
            const __m256i table = _mm256_slli_epi32(classes_at(bounds, classes.shift + at), 7);
            __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables), _mm256_add_epi32(table, symbol), 4);
            const __m256i escaped = _mm256_or_si256(_mm256_cmpeq_epi32(symbol, escape),
                                                    _mm256_cmpeq_epi32(entry, _mm256_setzero_si256()));
            if (const unsigned mask = bits_of(escaped); __builtin_expect(mask != 0, 0)) {
                const __m256i other = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables), _mm256_add_epi32(table, escape), 4);
                entry = _mm256_blendv_epi8(entry, other, escaped);
                keep_escapes(into, numbers + at, mask);
            }
            put(into, v, _mm256_and_si256(entry, _mm256_set1_epi32(0xFFFF)), _mm256_srli_epi32(entry, 16));
        }
    }
}

RETAIN_AVX2 void encode_refinement(Encoder& into, const std::uint32_t* splits, Classes classes, std::size_t count,
                                   const std::int16_t* numbers) {
    const std::size_t whole = count / kLanes * kLanes;
    if (whole < count) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + whole};
        kPortable.encode_refinement(into, splits, rest, count - whole, numbers + whole);
    }
    const Bounds bounds = bounds_of(classes);
    const __m256i zero = _mm256_setzero_si256(), total = _mm256_set1_epi32(kTotal);
    for (std::size_t i = whole; i > 0; i -= kLanes) {
#pragma GCC unroll 4
        for (std::size_t v = kVectors; v-- > 0;) {
            const std::size_t at = i - kLanes + v * kVector;
            const __m256i number = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + at)));
            // |coarse| = (|number| + 1) / 3, by multiplication: exact below 2^15.
            const __m256i size = _mm256_abs_epi32(number);
            const __m256i known = _mm256_srli_epi32(
                _mm256_mullo_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(1)), _mm256_set1_epi32(43691)), 17);
            // Away from zero is +1, whichever sign the coarse number has; that of 0 has none: there the digit's own counts.
            const __m256i outward = _mm256_sub_epi32(size, _mm256_add_epi32(known, _mm256_slli_epi32(known, 1)));
            const __m256i none = _mm256_cmpeq_epi32(known, zero);
            const __m256i digit = _mm256_blendv_epi8(outward, number, none);
            const __m256i context = _mm256_min_epi32(known, _mm256_set1_epi32(kContexts - 1));
            const __m256i own = classes_at(bounds, classes.shift + at);
            const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(own, 2), context);
            const __m256i split = _mm256_i32gather_epi32(reinterpret_cast<const int*>(splits), index, 4);
            const __m256i middle = _mm256_and_si256(split, _mm256_set1_epi32(0xFFFF)), upper = _mm256_srli_epi32(split, 16);
            const __m256i below = _mm256_cmpgt_epi32(zero, digit), top = _mm256_cmpgt_epi32(digit, zero);
            const __m256i start = _mm256_andnot_si256(below, _mm256_blendv_epi8(middle, upper, top));
            const __m256i stop = _mm256_blendv_epi8(_mm256_blendv_epi8(upper, total, top), middle, below);
            put(into, v, _mm256_sub_epi32(stop, start), start);
        }
    }
}

}  // namespace

const Kernels kAvx2 = {"avx2", decode, refine, encode, encode_refinement};

}  // namespace retain::rans

#endif
