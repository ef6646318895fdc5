// Between a block's arrays and the components of a part: plain loops that compilers vectorise.

#include "transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

// Made several times, for the instruction sets named; which one runs is chosen when the module is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RETAIN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RETAIN_CLONES
#endif

#define RETAIN_INLINE static inline __attribute__((always_inline))

namespace retain::transform {

namespace {


// The largest finite number of a kind.
constexpr float limit_of(Kind kind) {
    return kind == Kind::kFloat16 ? 65504.0F : kind == Kind::kBfloat16 ? 0x1.FEp127F : 0x1.FFFFFEp127F;
}

RETAIN_INLINE void widen(const void* from, Kind kind, std::size_t count, float* to) {
    if (kind == Kind::kFloat32) {
        std::memcpy(to, from, count * sizeof(float));
    } else if (kind == Kind::kFloat16) {
        const auto* halves = static_cast<const _Float16*>(from);
        for (std::size_t i = 0; i < count; ++i) {
            to[i] = static_cast<float>(halves[i]);
        }
    } else {
        const auto* upper = static_cast<const std::uint16_t*>(from);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t bits = static_cast<std::uint32_t>(upper[i]) << 16;
            std::memcpy(to + i, &bits, sizeof bits);
        }
    }
}

RETAIN_INLINE void narrow(const float* from, Kind kind, std::size_t count, void* to) {
    if (kind == Kind::kFloat32) {
        std::memcpy(to, from, count * sizeof(float));
    } else if (kind == Kind::kFloat16) {
        auto* halves = static_cast<_Float16*>(to);
        for (std::size_t i = 0; i < count; ++i) {
            halves[i] = static_cast<_Float16>(from[i]);
        }
    } else {
        auto* upper = static_cast<std::uint16_t*>(to);
        for (std::size_t i = 0; i < count; ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            upper[i] = static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        }
    }
}

RETAIN_INLINE void turn(float* row, const Angles& angles, std::size_t t) {
    const float* cosine = angles.cosine + t * angles.pairs;
    const float* sine = angles.sine + t * angles.pairs;
    if (angles.interleaved) {
        for (std::size_t i = 0; i < angles.pairs; ++i) {
            const float a = row[2 * i], b = row[2 * i + 1];
            row[2 * i] = a * cosine[i] - b * sine[i];
            row[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
    } else {
        float* other = row + angles.pairs;
#pragma GCC ivdep
        for (std::size_t i = 0; i < angles.pairs; ++i) {
            const float a = row[i], b = other[i];
            row[i] = a * cosine[i] - b * sine[i];
            other[i] = b * cosine[i] + a * sine[i];
        }
    }
}

RETAIN_INLINE char* row_of(const Head& head, std::size_t t) {
    const std::ptrdiff_t item = head.kind == Kind::kFloat32 ? 4 : 2;
    return static_cast<char*>(head.data) + static_cast<std::ptrdiff_t>(t) * head.stride * item;
}

}  // namespace

RETAIN_CLONES void gather(const Head& head, const Angles& angles, const float* mean, const float* weight, float* rows,
                          std::size_t stride) {
    for (std::size_t t = 0; t < head.tokens; ++t) {
        float* row = rows + t * stride;
        widen(row_of(head, t), head.kind, head.dim, row);
        if (angles.pairs > 0) {
            turn(row, angles, t);
        }
        for (std::size_t i = 0; i < head.dim; ++i) {
            row[i] = (row[i] - mean[i]) * weight[i];
        }
    }
}

RETAIN_CLONES void scatter(const Head& head, const Angles& angles, const float* mean, const float* inverse,
                           const float* rows, std::size_t stride) {
    alignas(64) float row[kLargestHead];
    const float limit = limit_of(head.kind);
    for (std::size_t t = 0; t < head.tokens; ++t) {
        const float* from = rows + t * stride;
        for (std::size_t i = 0; i < head.dim; ++i) {
            row[i] = from[i] * inverse[i] + mean[i];
        }
        if (angles.pairs > 0) {
            turn(row, angles, t);
        }
        for (std::size_t i = 0; i < head.dim; ++i) {
            row[i] = std::min(std::max(-limit, row[i]), limit);
        }
        narrow(row, head.kind, head.dim, row_of(head, t));
    }
}

RETAIN_CLONES void project(const Head& head, const Angles& angles, const float* probe, float* out, float* norm) {
    alignas(64) float row[kLargestHead];
    for (std::size_t t = 0; t < head.tokens; ++t) {
        widen(row_of(head, t), head.kind, head.dim, row);
        if (angles.pairs > 0) {
            turn(row, angles, t);
        }
        float sum = 0, square = 0;
        for (std::size_t i = 0; i < head.dim; ++i) {
            sum += row[i] * probe[i];
            square += row[i] * row[i];
        }
        out[t] = sum;
        norm[t] = std::sqrt(square);
    }
}

RETAIN_CLONES float quantise(const float* values, const float* scale, std::size_t tokens, std::int16_t* numbers) {
    std::uint32_t largest = 0;  // of magnitudes as bits: their order is that of the numbers, and NaN is above all
    for (std::size_t t = 0; t < tokens; ++t) {
        const float whole = std::nearbyint(values[t] * scale[t]);
        std::uint32_t bits;
        std::memcpy(&bits, &whole, sizeof bits);
        largest = std::max(largest, bits & 0x7FFFFFFFU);
        numbers[t] = static_cast<std::int16_t>(std::min(std::max(-32767.0F, whole), 32767.0F));
    }
    float size;
    std::memcpy(&size, &largest, sizeof size);
    return size;
}

RETAIN_CLONES float loudness(const float* values, const float* share, std::size_t tokens) {
    float sums[16] = {};
    std::size_t t = 0;
    for (; t + 16 <= tokens; t += 16) {
        for (std::size_t i = 0; i < 16; ++i) {
            sums[i] += std::fabs(values[t + i]) * share[t + i];
        }
    }
    float total = 0;
    for (; t < tokens; ++t) {
        total += std::fabs(values[t]) * share[t];
    }
    for (const float sum : sums) {
        total += sum;
    }
    return total;
}

RETAIN_CLONES void add_sizes(const float* values, float factor, std::size_t tokens, float* sums) {
    for (std::size_t t = 0; t < tokens; ++t) {
        sums[t] += std::fabs(values[t]) * factor;
    }
}

RETAIN_CLONES bool restore(const std::int16_t* numbers, const float* scale, std::size_t tokens, float* values) {
    int any = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
        any |= numbers[t];
        values[t] = static_cast<float>(numbers[t]) * scale[t];
    }
    return any != 0;
}

}  // namespace retain::transform
