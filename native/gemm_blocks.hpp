// The blocking of the ladder's matrix products, for vectors of any width: each gemm_*.cpp makes it for one instruction set,
// and defines RETAIN_TARGET, the attribute that allows the compiler to use it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm.hpp"

namespace retain::gemm {
namespace {

// `Set` gives Vector (a type of kWidth floats), the sum of its numbers, widen(const uint16_t*, float*, count) and the sizes
// of the two tiles.
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
        constexpr std::size_t kRows = Set::kProjectRows, kColumns = Set::kProjectColumns;
        constexpr std::size_t kGroup = 64 / kColumns * kColumns;
        std::vector<float> panel(kRows * stride, 0.0F);
        for (std::size_t group = 0; group < tokens; group += kGroup) {
            const std::size_t stop = std::min(tokens, group + kGroup);
            for (std::size_t c = 0; c < width; c += kRows) {
                const std::size_t rows = std::min(kRows, width - c);
                for (std::size_t r = 0; r < rows; ++r) {
                    Set::widen(basis + (c + r) * width, panel.data() + r * stride, width);
                }
                for (std::size_t t = group; t < stop; t += kColumns) {
                    const std::size_t columns = std::min(kColumns, stop - t);
                    const float* at[kColumns];
                    for (std::size_t j = 0; j < kColumns; ++j) {
                        at[j] = numbers + (t + std::min(j, columns - 1)) * stride;
                    }
                    Vector sums[kRows][kColumns] = {};
                    for (std::size_t w = 0; w < stride; w += kWidth) {
                        Vector right[kColumns];
#pragma GCC unroll 8
                        for (std::size_t j = 0; j < kColumns; ++j) {
                            right[j] = load(at[j] + w);
                        }
#pragma GCC unroll 8
                        for (std::size_t r = 0; r < kRows; ++r) {
                            const Vector left = load(panel.data() + r * stride + w);
#pragma GCC unroll 8
                            for (std::size_t j = 0; j < kColumns; ++j) {
                                sums[r][j] += left * right[j];
                            }
                        }
                    }
                    for (std::size_t r = 0; r < rows; ++r) {
                        for (std::size_t j = 0; j < columns; ++j) {
                            out[(c + r) * tokens + t + j] = Set::sum(sums[r][j]);
                        }
                    }
                }
            }
        }
    }

    RETAIN_TARGET static inline __attribute__((always_inline)) void spread(const std::uint16_t* basis, std::size_t width,
                                                             const std::uint32_t* rows, std::size_t count,
                                                             const float* values, std::size_t tokens, float* out,
                                                             std::size_t stride) {
        constexpr std::size_t kHigh = Set::kSpreadTokens, kWide = Set::kSpreadVectors * kWidth;
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
                    Vector sums[kHigh][Set::kSpreadVectors] = {};
                    const float* left = packed.data() + t * count;
                    const float* right = panel.data();
                    for (std::size_t i = 0; i < count; ++i, left += kHigh, right += kWide) {
                        Vector columns[Set::kSpreadVectors];
#pragma GCC unroll 4
                        for (std::size_t v = 0; v < Set::kSpreadVectors; ++v) {
                            columns[v] = load(right + v * kWidth);
                        }
#pragma GCC unroll 16
                        for (std::size_t h = 0; h < kHigh; ++h) {
#pragma GCC unroll 4
                            for (std::size_t v = 0; v < Set::kSpreadVectors; ++v) {
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
