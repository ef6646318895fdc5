// The two matrix products of the ladder's transform, by blocks that stay in the caches.
//
// A basis has `width` rows (components) of `width` float16 numbers. Rows of numbers (one a token) are padded with zeros to a
// `stride` that is a multiple of 16. Results may differ in the last bits from one processor to another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace retain::gemm {

constexpr std::size_t kPad = 16;

struct Kernels {
    const char* name;
    // out[c][t] = sum over w of basis[c][w] * numbers[t][w]; out is [width][tokens].
    void (*project)(const std::uint16_t* basis, std::size_t width, const float* numbers, std::size_t stride,
                    std::size_t tokens, float* out);
    // out[t][w] = sum over i of values[i][t] * basis[rows[i]][w], for `count` rows; values are [count][tokens].
    void (*spread)(const std::uint16_t* basis, std::size_t width, const std::uint32_t* rows, std::size_t count,
                   const float* values, std::size_t tokens, float* out, std::size_t stride);
};

// The fastest that this processor can run.
const Kernels& kernels();

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace retain::gemm
