#include "pages.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace retain {

namespace {

#if defined(__SSE2__)
inline __m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store(void* to, __m128i value) { _mm_storeu_si128(static_cast<__m128i*>(to), value); }
#endif

// A square tile that is transposed in registers: as many numbers as fill 16 bytes.
template <typename T>
constexpr std::size_t kTile = 16 / sizeof(T);

template <typename T>
void transpose_tile(const char* from, std::ptrdiff_t from_line, char* to, std::ptrdiff_t to_line) {
    for (std::size_t y = 0; y < kTile<T>; ++y) {
        for (std::size_t x = 0; x < kTile<T>; ++x) {
            T value;
            std::memcpy(&value, from + static_cast<std::ptrdiff_t>(y) * from_line + x * sizeof(T), sizeof(T));
            std::memcpy(to + static_cast<std::ptrdiff_t>(x) * to_line + y * sizeof(T), &value, sizeof(T));
        }
    }
}

#if defined(__SSE2__)
template <>
void transpose_tile<std::uint32_t>(const char* from, std::ptrdiff_t from_line, char* to, std::ptrdiff_t to_line) {
    const __m128i a = load(from), b = load(from + from_line);
    const __m128i c = load(from + 2 * from_line), d = load(from + 3 * from_line);
    const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
    const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
    store(to, _mm_unpacklo_epi64(ab_low, cd_low));
    store(to + to_line, _mm_unpackhi_epi64(ab_low, cd_low));
    store(to + 2 * to_line, _mm_unpacklo_epi64(ab_high, cd_high));
    store(to + 3 * to_line, _mm_unpackhi_epi64(ab_high, cd_high));
}

template <>
void transpose_tile<std::uint16_t>(const char* from, std::ptrdiff_t from_line, char* to, std::ptrdiff_t to_line) {
    __m128i line[8], pair[8], four[8];
    for (int i = 0; i < 8; ++i) {
        line[i] = load(from + i * from_line);
    }
    for (int i = 0; i < 4; ++i) {
        pair[2 * i] = _mm_unpacklo_epi16(line[2 * i], line[2 * i + 1]);
        pair[2 * i + 1] = _mm_unpackhi_epi16(line[2 * i], line[2 * i + 1]);
    }
    for (int half = 0; half < 2; ++half) {
        const __m128i* p = pair + 4 * half;
        __m128i* f = four + 4 * half;
        f[0] = _mm_unpacklo_epi32(p[0], p[2]);
        f[1] = _mm_unpackhi_epi32(p[0], p[2]);
        f[2] = _mm_unpacklo_epi32(p[1], p[3]);
        f[3] = _mm_unpackhi_epi32(p[1], p[3]);
    }
    for (int i = 0; i < 4; ++i) {
        store(to + 2 * i * to_line, _mm_unpacklo_epi64(four[i], four[4 + i]));
        store(to + (2 * i + 1) * to_line, _mm_unpackhi_epi64(four[i], four[4 + i]));
    }
}
#endif

// to[x][y] = from[y][x] for `lines` lines of `width` numbers, each line's numbers lying together on either side.
template <typename T>
void transpose(const char* from, std::ptrdiff_t from_line, char* to, std::ptrdiff_t to_line, std::size_t lines,
               std::size_t width) {
    const std::size_t whole_lines = lines - lines % kTile<T>;
    const std::size_t whole_width = width - width % kTile<T>;
    const auto one = [&](std::size_t y, std::size_t x) {
        std::memcpy(to + static_cast<std::ptrdiff_t>(x) * to_line + y * sizeof(T),
                    from + static_cast<std::ptrdiff_t>(y) * from_line + x * sizeof(T), sizeof(T));
    };
    for (std::size_t y = 0; y < whole_lines; y += kTile<T>) {
        for (std::size_t x = 0; x < whole_width; x += kTile<T>) {
            transpose_tile<T>(from + static_cast<std::ptrdiff_t>(y) * from_line + x * sizeof(T), from_line,
                              to + static_cast<std::ptrdiff_t>(x) * to_line + y * sizeof(T), to_line);
        }
        for (std::size_t line = y; line < y + kTile<T>; ++line) {
            for (std::size_t x = whole_width; x < width; ++x) {
                one(line, x);
            }
        }
    }
    for (std::size_t y = whole_lines; y < lines; ++y) {
        for (std::size_t x = 0; x < width; ++x) {
            one(y, x);
        }
    }
}

// The two halves of a head as neighbouring pairs, and back.
template <typename T>
void to_pairs(const char* halves, char* pairs, std::size_t dim) {
    const std::size_t half = dim / 2;
    std::size_t i = 0;
#if defined(__SSE2__)
    if constexpr (sizeof(T) >= 2) {
        for (; i + kTile<T> <= half; i += kTile<T>) {
            const __m128i a = load(halves + i * sizeof(T)), b = load(halves + (half + i) * sizeof(T));
            char* to = pairs + 2 * i * sizeof(T);
            store(to, sizeof(T) == 2 ? _mm_unpacklo_epi16(a, b) : _mm_unpacklo_epi32(a, b));
            store(to + 16, sizeof(T) == 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpackhi_epi32(a, b));
        }
    }
#endif
    for (; i < half; ++i) {
        std::memcpy(pairs + 2 * i * sizeof(T), halves + i * sizeof(T), sizeof(T));
        std::memcpy(pairs + (2 * i + 1) * sizeof(T), halves + (half + i) * sizeof(T), sizeof(T));
    }
}

template <typename T>
void to_halves(const char* pairs, char* halves, std::size_t dim) {
    const std::size_t half = dim / 2;
    std::size_t i = 0;
#if defined(__SSE2__)
    if constexpr (sizeof(T) >= 2) {
        for (; i + kTile<T> <= half; i += kTile<T>) {
            const __m128i a = load(pairs + 2 * i * sizeof(T)), b = load(pairs + 2 * i * sizeof(T) + 16);
            __m128i first, second;
            if constexpr (sizeof(T) == 2) {
                // Extended to 32 bits, each number is what packing with saturation leaves as it is.
                first = _mm_packs_epi32(_mm_srai_epi32(_mm_slli_epi32(a, 16), 16), _mm_srai_epi32(_mm_slli_epi32(b, 16), 16));
                second = _mm_packs_epi32(_mm_srai_epi32(a, 16), _mm_srai_epi32(b, 16));
            } else {
                const __m128i even_a = _mm_shuffle_epi32(a, 0xD8), even_b = _mm_shuffle_epi32(b, 0xD8);
                first = _mm_unpacklo_epi64(even_a, even_b);
                second = _mm_unpackhi_epi64(even_a, even_b);
            }
            store(halves + i * sizeof(T), first);
            store(halves + (half + i) * sizeof(T), second);
        }
    }
#endif
    for (; i < half; ++i) {
        std::memcpy(halves + i * sizeof(T), pairs + 2 * i * sizeof(T), sizeof(T));
        std::memcpy(halves + (half + i) * sizeof(T), pairs + (2 * i + 1) * sizeof(T), sizeof(T));
    }
}

// Calls `work` with a number of the layout's size.
template <typename Work>
void by_item(std::size_t item, const Work& work) {
    if (item == 4) {
        work(std::uint32_t{});
    } else if (item == 2) {
        work(std::uint16_t{});
    } else {
        work(std::uint8_t{});
    }
}

// One head's tokens in one page: `engine` is their first number in the page, `canonical` in the array.
template <bool kToPages>
void copy_tokens(const PageLayout& layout, char* engine, char* canonical, std::size_t count) {
    const auto item = static_cast<std::ptrdiff_t>(layout.item);
    const std::size_t row = layout.dim * layout.item;
    if (layout.pairs) {
        by_item(layout.item, [&](auto number) {
            using T = decltype(number);
            for (std::size_t t = 0; t < count; ++t, engine += layout.token_stride, canonical += row) {
                kToPages ? to_pairs<T>(canonical, engine, layout.dim) : to_halves<T>(engine, canonical, layout.dim);
            }
        });
        return;
    }
    if (layout.dim_stride == item) {
        if (layout.token_stride == static_cast<std::ptrdiff_t>(row)) {
            kToPages ? std::memcpy(engine, canonical, count * row) : std::memcpy(canonical, engine, count * row);
            return;
        }
        for (std::size_t t = 0; t < count; ++t, engine += layout.token_stride, canonical += row) {
            kToPages ? std::memcpy(engine, canonical, row) : std::memcpy(canonical, engine, row);
        }
        return;
    }
    if (layout.token_stride == item) {
        by_item(layout.item, [&](auto number) {
            using T = decltype(number);
            if constexpr (kToPages) {
                transpose<T>(canonical, static_cast<std::ptrdiff_t>(row), engine, layout.dim_stride, count, layout.dim);
            } else {
                transpose<T>(engine, layout.dim_stride, canonical, static_cast<std::ptrdiff_t>(row), layout.dim, count);
            }
        });
        return;
    }
    for (std::size_t t = 0; t < count; ++t, engine += layout.token_stride, canonical += row) {
        for (std::size_t d = 0; d < layout.dim; ++d) {
            char* in_page = engine + static_cast<std::ptrdiff_t>(d) * layout.dim_stride;
            char* in_array = canonical + d * layout.item;
            kToPages ? std::memcpy(in_page, in_array, layout.item) : std::memcpy(in_array, in_page, layout.item);
        }
    }
}

template <bool kToPages>
void copy(const PageLayout& layout, const Canonical& array, const TokenRange& range) {
    for (std::size_t layer = 0; layer < layout.bases.size(); ++layer) {
        char* rows = array.data + static_cast<std::ptrdiff_t>(layout.rows[layer]) * array.row_stride;
        std::size_t done = 0;
        while (done < range.count) {
            const std::size_t at = range.first + done;
            const std::size_t offset = at % layout.page_tokens;
            const std::size_t count = std::min(range.count - done, layout.page_tokens - offset);
            char* page = reinterpret_cast<char*>(layout.bases[layer]) +
                         range.table[at / layout.page_tokens] * layout.page_stride +
                         static_cast<std::ptrdiff_t>(offset) * layout.token_stride;
            char* tokens = rows + (range.start + done) * layout.dim * layout.item;
            for (std::size_t head = 0; head < layout.heads; ++head) {
                copy_tokens<kToPages>(layout, page + static_cast<std::ptrdiff_t>(head) * layout.head_stride,
                                      tokens + static_cast<std::ptrdiff_t>(head) * array.head_stride, count);
            }
            done += count;
        }
    }
}

}  // namespace

void gather(const PageLayout& layout, const Canonical& array, const TokenRange& range) { copy<false>(layout, array, range); }

void scatter(const PageLayout& layout, const Canonical& array, const TokenRange& range) { copy<true>(layout, array, range); }

}  // namespace retain
