// The blocking of the ladder's matrix products, for vectors of any width: each gemm_*.cpp makes it for one instruction set,
// and defines RETAIN_TARGET, the attribute that allows the compiler to use it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm.hpp"

namespace retain::gemm {
namespace {

// `Set` gives Vector (a type of kWidth floats), widen(const uint16_t*, float*, count), and the tile that fits its registers:
// kHigh broadcast numbers by kVectors vectors.
template <typename Set>
struct Blocks {
    using Vector = typename Set::Vector;
    static constexpr std::size_t kWidth = sizeof(Vector) / sizeof(float);
    static constexpr std::size_t kTokens = 128;  // at a time: their values and a panel of the basis fit the L2 cache

    RETAIN_TARGET static inline __attribute__((always_inline)) Vector load(const float* from) {
        Vector value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }

    RETAIN_TARGET static inline __attribute__((always_inline)) void project(const std::uint16_t* basis, std::size_t width,
                                                              const float* numbers, std::size_t stride,
                                                              std::size_t tokens, float* out) {
        constexpr std::size_t kHigh = Set::kHigh, kWide = Set::kVectors * kWidth;
        // Numbers are laid out anew, a panel of some tokens after the other, so that a vector holds tokens.
        std::vector<float> packed((tokens + kWide - 1) / kWide * kWide * width, 0.0F), panel(kHigh * width, 0.0F);
        for (std::size_t t = 0; t < tokens; ++t) {
            float* to = packed.data() + t / kWide * kWide * width + t % kWide;
            for (std::size_t w = 0; w < width; ++w) {
                to[w * kWide] = numbers[t * stride + w];
            }
        }
        for (std::size_t c = 0; c < width; c += kHigh) {
            const std::size_t high = std::min(kHigh, width - c);
            for (std::size_t h = 0; h < high; ++h) {
                Set::widen(basis + (c + h) * width, panel.data() + h * width, width);
            }
            for (std::size_t t = 0; t < tokens; t += kWide) {
                Vector sums[kHigh][Set::kVectors] = {};
                const float* right = packed.data() + t * width;
                for (std::size_t w = 0; w < width; ++w, right += kWide) {
                    Vector columns[Set::kVectors];
#pragma GCC unroll 4
                    for (std::size_t v = 0; v < Set::kVectors; ++v) {
                        columns[v] = load(right + v * kWidth);
                    }
#pragma GCC unroll 16
                    for (std::size_t h = 0; h < kHigh; ++h) {
#pragma GCC unroll 4
                        for (std::size_t v = 0; v < Set::kVectors; ++v) {
                            sums[h][v] += panel[h * width + w] * columns[v];
                        }
                    }
                }
                const std::size_t wide = std::min(kWide, tokens - t);
                for (std::size_t h = 0; h < high; ++h) {
                    std::memcpy(out + (c + h) * tokens + t, &sums[h][0], wide * sizeof(float));
                }
            }
        }
    }

    RETAIN_TARGET static inline __attribute__((always_inline)) void spread(const std::uint16_t* basis, std::size_t width,
                                                             const std::uint32_t* rows, std::size_t count,
                                                             const float* values, std::size_t tokens, float* out,
                                                             std::size_t stride) {
        constexpr std::size_t kHigh = Set::kHigh, kWide = Set::kVectors * kWidth;
        constexpr std::size_t kTiles = (kTokens + kHigh - 1) / kHigh;
        std::vector<float> packed(kTiles * count * kHigh), panel(count * kWide, 0.0F);
        for (std::size_t group = 0; group < tokens; group += kTiles * kHigh) {
            const std::size_t inside = std::min(kTiles * kHigh, tokens - group);
            for (std::size_t i = 0; i < count; ++i) {
                const float* row = values + i * tokens + group;
                for (std::size_t t = 0; t < inside; ++t) {
                    packed[(t / kHigh * count + i) * kHigh + t % kHigh] = row[t];
                }
            }
            for (std::size_t w = 0; w < width; w += kWide) {
                const std::size_t wide = std::min(kWide, width - w);
                for (std::size_t i = 0; i < count; ++i) {
                    Set::widen(basis + rows[i] * width + w, panel.data() + i * kWide, wide);
                }
                for (std::size_t t = 0; t < inside; t += kHigh) {
                    Vector sums[kHigh][Set::kVectors] = {};
                    const float* left = packed.data() + t * count;
                    const float* right = panel.data();
                    for (std::size_t i = 0; i < count; ++i, left += kHigh, right += kWide) {
                        Vector columns[Set::kVectors];
#pragma GCC unroll 4
                        for (std::size_t v = 0; v < Set::kVectors; ++v) {
                            columns[v] = load(right + v * kWidth);
                        }
#pragma GCC unroll 16
                        for (std::size_t h = 0; h < kHigh; ++h) {
#pragma GCC unroll 4
                            for (std::size_t v = 0; v < Set::kVectors; ++v) {
                                sums[h][v] += left[h] * columns[v];
                            }
                        }
                    }
                    const std::size_t high = std::min(kHigh, inside - t);
                    for (std::size_t h = 0; h < high; ++h) {
                        std::memcpy(out + (group + t + h) * stride + w, &sums[h][0], wide * sizeof(float));
                    }
                }
            }
        }
    }
};

}  // namespace
}  // namespace retain::gemm
