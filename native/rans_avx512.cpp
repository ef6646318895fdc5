// Interleaved rANS with AVX-512: two vectors of 16 lanes.

#if defined(__x86_64__)

#include <immintrin.h>

#include "rans.hpp"

#define RETAIN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#define RETAIN_INLINE RETAIN_AVX512 inline __attribute__((always_inline))

namespace retain::rans {
namespace {

constexpr std::size_t kVector = 16;

RETAIN_INLINE __mmask16 live(std::size_t lanes) {
    return lanes >= kVector ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1U << lanes) - 1);
}

struct Bounds {
    __m512i own, low, high;
};

RETAIN_INLINE Bounds bounds_of(const Classes& classes) {
    return {_mm512_set1_epi32(classes.own), _mm512_set1_epi32(classes.low), _mm512_set1_epi32(classes.high)};
}

RETAIN_INLINE __m512i classes_at(const Bounds& bounds, const std::int32_t* shift, __mmask16 on) {
    const __m512i sum = _mm512_add_epi32(bounds.own, _mm512_maskz_loadu_epi32(on, shift));
    return _mm512_min_epi32(_mm512_max_epi32(sum, bounds.low), bounds.high);
}

// Refills the states of `on` that are low; the caller has made sure that 16 words are there.
RETAIN_INLINE __m512i refill(Decoder& from, __m512i state, __mmask16 on) {
    const __mmask16 low = _mm512_mask_cmplt_epu32_mask(on, state, _mm512_set1_epi32(kLow));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.at)));
    from.at += 2 * _mm_popcnt_u32(low);
    return _mm512_or_si512(_mm512_mask_slli_epi32(state, low, state, 16), _mm512_maskz_expand_epi32(low, words));
}

RETAIN_INLINE __m512i decoded(Decoder& from, const std::uint32_t* tables, const Bounds& bounds,
                              const std::int32_t* shift, __m512i state, __mmask16 on, std::int16_t* numbers) {
    const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(kTotal - 1));
    const __m512i table = _mm512_slli_epi32(classes_at(bounds, shift, on), kBits);
    const __m512i entry = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), on, _mm512_add_epi32(table, slot), tables, 4);
    const __m512i product = _mm512_mullo_epi32(_mm512_srli_epi32(entry, 20), _mm512_srli_epi32(state, kBits));
    const __m512i place = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(kTotal - 1));
    const __m512i number = _mm512_sub_epi32(_mm512_and_si512(entry, _mm512_set1_epi32(0xFF)), _mm512_set1_epi32(kZero));
    _mm256_mask_storeu_epi16(numbers, on, _mm512_cvtepi32_epi16(number));
    return refill(from, _mm512_mask_add_epi32(state, on, product, place), on);
}

RETAIN_AVX512 bool decode(Decoder& from, const std::uint32_t* tables, Classes classes, std::size_t count,
                          std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    __m512i first = _mm512_load_si512(from.state), second = _mm512_load_si512(from.state + kVector);
    std::size_t i = 0;
    for (; i < count && from.end - from.at >= static_cast<std::ptrdiff_t>(2 * kLanes); i += kLanes) {
        const std::size_t left = count - i;
        first = decoded(from, tables, bounds, classes.shift + i, first, live(left), numbers + i);
        if (left > kVector) {
            second = decoded(from, tables, bounds, classes.shift + i + kVector, second, live(left - kVector),
                             numbers + i + kVector);
        }
    }
    _mm512_store_si512(from.state, first);
    _mm512_store_si512(from.state + kVector, second);
    for (; i < count; i += kLanes) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + i};
        if (!decode_step(from, tables, rest, count - i < kLanes ? count - i : kLanes, numbers + i)) {
            return false;
        }
    }
    return true;
}

RETAIN_INLINE __m512i refined(Decoder& from, const std::uint32_t* splits, const Bounds& bounds,
                              const std::int32_t* shift, __m512i state, __mmask16 on, std::int16_t* numbers) {
    const __m512i known = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, numbers));
    const __m512i context = _mm512_min_epi32(_mm512_abs_epi32(known), _mm512_set1_epi32(kContexts - 1));
    const __m512i index = _mm512_add_epi32(_mm512_slli_epi32(classes_at(bounds, shift, on), 2), context);
    const __m512i split = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), on, index, splits, 4);
    const __m512i middle = _mm512_and_si512(split, _mm512_set1_epi32(0xFFFF));
    const __m512i upper = _mm512_srli_epi32(split, 16);
    const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(kTotal - 1));
    const __mmask16 above = _mm512_cmpge_epu32_mask(slot, middle), top = _mm512_cmpge_epu32_mask(slot, upper);
    const __m512i start = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(above, middle), top, upper);
    const __m512i stop = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(middle, above, upper), top, _mm512_set1_epi32(kTotal));
    const __m512i product = _mm512_mullo_epi32(_mm512_sub_epi32(stop, start), _mm512_srli_epi32(state, kBits));
    __m512i digit = _mm512_mask_mov_epi32(_mm512_set1_epi32(-1), above, _mm512_setzero_si512());
    digit = _mm512_mask_mov_epi32(digit, top, _mm512_set1_epi32(1));
    const __mmask16 negative = _mm512_movepi32_mask(known);
    digit = _mm512_mask_sub_epi32(digit, negative, _mm512_setzero_si512(), digit);
    const __m512i number = _mm512_add_epi32(_mm512_add_epi32(known, _mm512_slli_epi32(known, 1)), digit);
    _mm256_mask_storeu_epi16(numbers, on, _mm512_cvtepi32_epi16(number));
    const __m512i place = _mm512_sub_epi32(slot, start);
    return refill(from, _mm512_mask_add_epi32(state, on, product, place), on);
}

RETAIN_AVX512 bool refine(Decoder& from, const std::uint32_t* splits, Classes classes, std::size_t count,
                          std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    __m512i first = _mm512_load_si512(from.state), second = _mm512_load_si512(from.state + kVector);
    std::size_t i = 0;
    for (; i < count && from.end - from.at >= static_cast<std::ptrdiff_t>(2 * kLanes); i += kLanes) {
        const std::size_t left = count - i;
        first = refined(from, splits, bounds, classes.shift + i, first, live(left), numbers + i);
        if (left > kVector) {
            second = refined(from, splits, bounds, classes.shift + i + kVector, second, live(left - kVector),
                             numbers + i + kVector);
        }
    }
    _mm512_store_si512(from.state, first);
    _mm512_store_si512(from.state + kVector, second);
    for (; i < count; i += kLanes) {
        const Classes rest{classes.own, classes.low, classes.high, classes.shift + i};
        if (!refine_step(from, splits, rest, count - i < kLanes ? count - i : kLanes, numbers + i)) {
            return false;
        }
    }
    return true;
}

RETAIN_INLINE __m512i put(Encoder& into, __m512i state, __m512i frequency, __m512i start, __mmask16 on) {
    const __mmask16 full = _mm512_mask_cmpge_epu32_mask(on, _mm512_srli_epi32(state, 32 - kBits), frequency);
    const unsigned words = _mm_popcnt_u32(full);
    into.at -= 2 * words;
    _mm256_mask_storeu_epi16(into.at, static_cast<__mmask16>((1U << words) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state)));
    state = _mm512_mask_srli_epi32(state, full, state, 16);
    // The quotient is below 2^20 and its float estimate at most one off.
    const __m512 ratio = _mm512_div_ps(_mm512_cvtepu32_ps(state), _mm512_cvtepu32_ps(frequency));
    __m512i quotient = _mm512_cvttps_epu32(ratio);
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
    const __mmask16 over = _mm512_movepi32_mask(rest);
    quotient = _mm512_mask_sub_epi32(quotient, over, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_add_epi32(rest, over, rest, frequency);
    const __mmask16 under = _mm512_cmpge_epu32_mask(rest, frequency);
    quotient = _mm512_mask_add_epi32(quotient, under, quotient, _mm512_set1_epi32(1));
    rest = _mm512_mask_sub_epi32(rest, under, rest, frequency);
    const __m512i next = _mm512_add_epi32(_mm512_slli_epi32(quotient, kBits), _mm512_add_epi32(rest, start));
    return _mm512_mask_mov_epi32(state, on, next);
}

RETAIN_AVX512 __attribute__((noinline)) void keep_escapes(Encoder& into, const std::int16_t* numbers, unsigned lanes) {
    for (int lane = kVector - 1; lane >= 0; --lane) {
        if (lanes >> lane & 1) {
            into.escapes.push_back(numbers[lane]);
        }
    }
}

RETAIN_INLINE __m512i encoded(Encoder& into, const std::uint32_t* tables, const Bounds& bounds,
                              const std::int32_t* shift, __m512i state, __mmask16 on, const std::int16_t* numbers) {
    const __m512i escape = _mm512_set1_epi32(kEscape);
    const __m512i number = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, numbers));
    const __m512i symbol = _mm512_min_epu32(_mm512_add_epi32(number, _mm512_set1_epi32(kZero)), escape);
    const __m512i table = _mm512_slli_epi32(classes_at(bounds, shift, on), 7);
    __m512i entry = _mm512_mask_i32gather_epi32(_mm512_set1_epi32(1), on, _mm512_add_epi32(table, symbol), tables, 4);
    const __mmask16 escaped = _mm512_mask_cmpeq_epi32_mask(on, symbol, escape) |
                              _mm512_mask_testn_epi32_mask(on, entry, entry);
    if (__builtin_expect(escaped != 0, 0)) {
        entry = _mm512_mask_i32gather_epi32(entry, escaped, _mm512_add_epi32(table, escape), tables, 4);
        keep_escapes(into, numbers, escaped);
    }
    return put(into, state, _mm512_and_si512(entry, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(entry, 16), on);
}

RETAIN_AVX512 void encode(Encoder& into, const std::uint32_t* tables, Classes classes, std::size_t count,
                          const std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    __m512i first = _mm512_load_si512(into.state), second = _mm512_load_si512(into.state + kVector);
    for (std::size_t steps = (count + kLanes - 1) / kLanes; steps-- > 0;) {
        const std::size_t i = steps * kLanes, left = count - i;
        if (left > kVector) {
            second = encoded(into, tables, bounds, classes.shift + i + kVector, second, live(left - kVector),
                             numbers + i + kVector);
        }
        first = encoded(into, tables, bounds, classes.shift + i, first, live(left), numbers + i);
    }
    _mm512_store_si512(into.state, first);
    _mm512_store_si512(into.state + kVector, second);
}

RETAIN_INLINE __m512i digit_encoded(Encoder& into, const std::uint32_t* splits, const Bounds& bounds,
                                    const std::int32_t* shift, __m512i state, __mmask16 on,
                                    const std::int16_t* numbers) {
    const __m512i number = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(on, numbers));
    const __mmask16 negative = _mm512_movepi32_mask(number);
    // |coarse| = (|number| + 1) / 3, by multiplication: exact below 2^15.
    const __m512i size = _mm512_abs_epi32(number);
    const __m512i third = _mm512_mullo_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(1)), _mm512_set1_epi32(43691));
    const __m512i known = _mm512_srli_epi32(third, 17);
    // Away from zero is +1, whichever sign the coarse number has; that of 0 has none, so there the digit's own counts.
    __m512i digit = _mm512_sub_epi32(size, _mm512_add_epi32(known, _mm512_slli_epi32(known, 1)));
    const __mmask16 none = _mm512_testn_epi32_mask(known, known);
    digit = _mm512_mask_sub_epi32(digit, none & negative, _mm512_setzero_si512(), digit);
    const __m512i context = _mm512_min_epi32(known, _mm512_set1_epi32(kContexts - 1));
    const __m512i index = _mm512_add_epi32(_mm512_slli_epi32(classes_at(bounds, shift, on), 2), context);
    const __m512i split = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), on, index, splits, 4);
    const __m512i middle = _mm512_and_si512(split, _mm512_set1_epi32(0xFFFF));
    const __m512i upper = _mm512_srli_epi32(split, 16);
    const __mmask16 top = _mm512_cmpgt_epi32_mask(digit, _mm512_setzero_si512());
    const __mmask16 above = top | _mm512_testn_epi32_mask(digit, digit);
    const __m512i start = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(above, middle), top, upper);
    __m512i stop = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(middle, above, upper), top, _mm512_set1_epi32(kTotal));
    stop = _mm512_mask_mov_epi32(_mm512_set1_epi32(kTotal), on, stop);  // no division by zero in lanes that are off
    return put(into, state, _mm512_sub_epi32(stop, start), start, on);
}

RETAIN_AVX512 void encode_refinement(Encoder& into, const std::uint32_t* splits, Classes classes, std::size_t count,
                                     const std::int16_t* numbers) {
    const Bounds bounds = bounds_of(classes);
    __m512i first = _mm512_load_si512(into.state), second = _mm512_load_si512(into.state + kVector);
    for (std::size_t steps = (count + kLanes - 1) / kLanes; steps-- > 0;) {
        const std::size_t i = steps * kLanes, left = count - i;
        if (left > kVector) {
            second = digit_encoded(into, splits, bounds, classes.shift + i + kVector, second, live(left - kVector),
                                   numbers + i + kVector);
        }
        first = digit_encoded(into, splits, bounds, classes.shift + i, first, live(left), numbers + i);
    }
    _mm512_store_si512(into.state, first);
    _mm512_store_si512(into.state + kVector, second);
}

}  // namespace

const Kernels kAvx512 = {"avx512", decode, refine, encode, encode_refinement};

}  // namespace retain::rans

#endif
